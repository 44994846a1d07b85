// One step of a MoE layer as a job of the pool: tokens in, combined rows out.
//
//   slot g (one a group, that is an expert with work)      slot G (the whole step)
//                                                           kQuantise: x -> MXINT, an item a token
//     kUp: pairs of gate and up strips -> h
//     the last kUp item quantises the group's h
//     kDown: down strips -> rows, finished
//                                                           kCombine: rows -> out (see Call::rows)
//
// kUp of all groups is published by the last kQuantise item, kDown of a group by its last kUp item,
// kCombine by the last kDown item of all. No barrier but these. What an item computes depends on the
// item alone, so neither threads nor the order of claims can change a bit (docs/numerics.md).
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "pool.h"
#include "record.h"
#include "routing.h"
#include "shape.h"

namespace moet {

constexpr int kMaxTopK = 64;

class Step final : public Job {
 public:
  Step(const LayerShape& shape, const Kernels& kernels);

  // Scratch that a step needs in the pool's workspace.
  size_t workspace_bytes() const;

  // Takes tokens first..first + tokens - 1 of a call, at most max_tokens. Refuses before any compute.
  void prepare(const Call& call, const ExpertTable& table, int first, int tokens, const Pool& pool);

  const Routing& routing() const { return routing_; }
  // Name of the kernel table that computed the last item, or null before the first.
  const char* ran_isa() const { return ran_isa_.load(std::memory_order_relaxed); }

  int slots() const override { return groups_ + 1; }
  bool worth_waking() const override;
  bool begin(Pool& pool) noexcept override;
  void work(const Claim& claim, int worker) override;
  bool finished(const Claim& claim, Pool& pool) noexcept override;

 private:
  enum Phase { kQuantise, kUp, kDown, kCombine };

  // How the work of a group is cut. Items left: of the phase that its slot is in.
  struct Cut {
    int pairs_an_item, downs_an_item;
    std::atomic<int> left;
  };

  void carve(uint8_t* memory);
  void point();
  void cut(int group, int threads);
  void cut_combine(int threads);
  void publish_ups(Pool& pool) noexcept;
  void publish_downs(int group, Pool& pool) noexcept;
  void publish_combine(Pool& pool) noexcept;

  void quantise_token(int token) const;
  void up(int group, uint32_t item) const;
  void up_pair(const Group& group, int pair) const;
  void quantise_h(const Group& group) const;
  void down(int group, uint32_t item) const;
  void hand_over_row(int position, int column, int columns) const;
  void combine(uint32_t item) const;

  int up_items(int group) const;
  int down_items(int group) const;
  int combine_items() const { return tokens_ * combine_parts_; }
  const float* bias(const Group& group, size_t offset) const;

  const LayerShape shape_;
  const RecordLayout layout_;
  const Kernels& kernels_;
  const size_t x_stride_, h_stride_;  // bytes of a quantised vector of H, of I
  Routing routing_;

  // Scratch, indexed by the sorted position of a routing (xq: by token).
  uint8_t* xq_ = nullptr;  // [T][x_stride]
  uint8_t* hq_ = nullptr;  // [routings][h_stride]
  float* h_ = nullptr;     // [routings][I]
  float* rows_ = nullptr;  // [routings][H]
  std::vector<const uint8_t*> x_of_, h_of_;  // [routings], what the strips are multiplied with

  Call call_{};
  int first_ = 0, tokens_ = 0, groups_ = 0;
  int combine_parts_ = 1, combine_columns_ = 0;
  std::unique_ptr<Cut[]> cuts_;
  std::atomic<int> quantises_left_{0}, groups_left_{0}, combines_left_{0};
  std::atomic<const char*> ran_isa_{nullptr};
};

}  // namespace moet
