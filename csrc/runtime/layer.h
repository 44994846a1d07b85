// The routed experts of one MoE layer: plan once, bind addresses, run.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "combine.h"
#include "pool.h"
#include "shape.h"
#include "step.h"

namespace moet {

class Layer {
 public:
  // Plans: checks the shape, sizes the scratch. `isa` names a kernel table that this CPU can run.
  Layer(std::shared_ptr<Pool> pool, const std::string& isa, const LayerShape& shape);

  // The record of an expert (docs/format.md) at a 64-byte aligned address. It must stay there until
  // unbind and the end of the run that may be in flight. Binding during a run affects later steps.
  void bind(int expert, uintptr_t record);
  void unbind(int expert);
  // Another rank owns the expert: slots that name it are skipped.
  void mark_foreign(int expert);

  // Runs the layer. Everything is checked before anything is computed. Allocates nothing.
  void run(const Call& call);
  // Combines rows of earlier runs (`call.rows`), of one or of many; x is not used. Allocates nothing.
  void combine_rows(const Call& call);

  const char* ran_isa() const { return step_.ran_isa(); }
  size_t record_bytes() const;
  size_t workspace_bytes() const { return step_.workspace_bytes(); }

 private:
  std::atomic<uintptr_t>& entry(int expert);
  void check(const Call& call) const;
  void check_output(const Call& call) const;

  const std::shared_ptr<Pool> pool_;
  const LayerShape shape_;
  Step step_;
  RowCombine combine_;
  ExpertTable table_;
};

}  // namespace moet
