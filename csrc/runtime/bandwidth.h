// What the memory can do: a read loop over the bytes of a layer, run by the same pool and cut like the
// kernels' work. The yardstick of `moet bench cpu`.
#pragma once
#include <cstddef>
#include <memory>

#include "pool.h"

namespace moet {

class ReadProbe {
 public:
  // Memory to read, 64-byte aligned, at least 1 MiB; for a figure that means the memory and not a
  // cache it must be much larger than the last-level cache. It must outlive the probe.
  ReadProbe(std::shared_ptr<Pool> pool, const uint8_t* data, size_t bytes);

  // Reads it once with all workers of the pool: bytes a second.
  double pass();

 private:
  const std::shared_ptr<Pool> pool_;
  const uint8_t* const data_;
  const size_t bytes_;
};

}  // namespace moet
