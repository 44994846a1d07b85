// What the memory can do: a read loop over a buffer much larger than the caches, run by the same pool
// and cut like the kernels' work. The yardstick of `moet bench cpu`.
#pragma once
#include <cstddef>
#include <memory>

#include "pool.h"
#include "workspace.h"

namespace moet {

class ReadProbe {
 public:
  // A huge-page buffer, touched. bytes is rounded up to 2 MiB.
  ReadProbe(std::shared_ptr<Pool> pool, size_t bytes);

  // Reads the buffer once with all workers of the pool: bytes a second.
  double pass();
  size_t bytes() const { return buffer_.size(); }

 private:
  const std::shared_ptr<Pool> pool_;
  Workspace buffer_;
};

}  // namespace moet
