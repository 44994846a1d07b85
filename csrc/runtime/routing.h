// A step's routings (token, slot) grouped by expert: each expert's bytes are then read once however
// many tokens share it. A stable counting sort: experts ascending, routings ascending inside one.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "shape.h"

namespace moet {

// Addresses of an expert's record, or what else a slot of the table can hold.
constexpr uintptr_t kUnbound = 0;
constexpr uintptr_t kForeign = 1;  // of another rank (expert parallelism): its slots are skipped

using ExpertTable = std::unique_ptr<std::atomic<uintptr_t>[]>;

struct Group {
  const uint8_t* record;
  int first;  // its routings are sorted[first .. first + count)
  int count;
};

class Routing {
 public:
  explicit Routing(const LayerShape& shape);

  // Refuses ids outside the layer and experts that are neither bound nor foreign, naming them.
  void check(const Call& call, const ExpertTable& table) const;

  // Groups the routings of `tokens` tokens from token `first` on. Allocates nothing.
  void sort(const Call& call, const ExpertTable& table, int first, int tokens);

  int groups() const { return groups_used_; }
  const Group& group(int g) const { return groups_[g]; }
  // Token (of the step) of the routing at a sorted position.
  int token(int position) const { return sorted_[position] / slots_; }
  // Routing (of the step: token * slots + slot) at a sorted position.
  int routing(int position) const { return sorted_[position]; }
  // Whether any slot of the token has work.
  bool meets(int token) const {
    const int* first = &positions_[size_t(token) * slots_];
    for (int s = 0; s < slots_; ++s)
      if (first[s] >= 0) return true;
    return false;
  }
  // Sorted position of (token, slot), or -1 where the slot is skipped.
  int position(int token, int slot) const { return positions_[size_t(token) * slots_ + slot]; }

 private:
  // The expert's record, or null where the slot is to be skipped.
  const uint8_t* record(const Call& call, const ExpertTable& table, size_t routing) const;

  const int experts_;
  int slots_ = 1;
  int groups_used_ = 0;
  std::vector<int> counts_;     // [E + 1]
  std::vector<int> sorted_;     // [routings]
  std::vector<int> positions_;  // [routings]
  std::vector<const uint8_t*> records_;  // [routings]
  std::vector<Group> groups_;
};

}  // namespace moet
