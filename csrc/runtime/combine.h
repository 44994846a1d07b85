// Rows that lie in memory -> outputs: the last phase of a step (docs/numerics.md, section 6) as a job of
// its own, for whoever had the rows computed in several runs (Call::rows). Same kernel, same order of
// slots, so the same bits as a step that does all of it.
#pragma once
#include <atomic>

#include "pool.h"
#include "shape.h"

namespace moet {

class RowCombine final : public Job {
 public:
  RowCombine(const LayerShape& shape, const Kernels& kernels);

  // Tokens of one job at most.
  int most_tokens() const;

  // Takes tokens first..first + tokens - 1 of a call whose rows are there. Rows of slots with a negative
  // id are never looked at.
  void prepare(const Call& call, int first, int tokens);

  int slots() const override { return 1; }
  bool worth_waking() const override;
  bool begin(Pool& pool) noexcept override;
  void work(const Claim& claim, int worker) override;
  bool finished(const Claim& claim, Pool& pool) noexcept override;

 private:
  const float* row(size_t routing, int column, int columns, float* scratch) const;

  const LayerShape shape_;
  const Kernels& kernels_;
  const int parts_;  // items of a token
  Call call_{};
  int first_ = 0, tokens_ = 0;
  std::atomic<int> left_{0};
};

}  // namespace moet
