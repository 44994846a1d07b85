#include "routing.h"

#include <algorithm>
#include <string>

#include "../core/refusal.h"

namespace moet {
namespace {

std::string place(const Call& call, size_t routing) {
  return "token " + std::to_string(routing / call.slots) + ", slot " +
         std::to_string(routing % call.slots);
}

}  // namespace

Routing::Routing(const LayerShape& shape)
    : experts_(shape.experts),
      counts_(shape.experts + 1),
      sorted_(size_t(shape.max_tokens) * shape.top_k),
      positions_(sorted_.size()),
      records_(sorted_.size()),
      groups_(std::min<size_t>(shape.experts, sorted_.size())) {}

const uint8_t* Routing::record(const Call& call, const ExpertTable& table, size_t routing) const {
  const int64_t id = call.id(routing);
  if (id < 0) return nullptr;
  if (id >= experts_)
    throw Refusal("expert id " + std::to_string(id) + " of " + place(call, routing) +
                      " is outside 0.." + std::to_string(experts_ - 1),
                  "negative ids mark empty slots; all others must name an expert of the layer");
  const uintptr_t address = table[id].load(std::memory_order_acquire);
  if (address == kUnbound)
    throw Refusal("expert " + std::to_string(id) + " (" + place(call, routing) + ") is not bound",
                  "bind its record, or mark it foreign if another rank owns it");
  return address == kForeign ? nullptr : reinterpret_cast<const uint8_t*>(address);
}

void Routing::check(const Call& call, const ExpertTable& table) const {
  const size_t routings = size_t(call.tokens) * call.slots;
  for (size_t r = 0; r < routings; ++r) record(call, table, r);
}

void Routing::sort(const Call& call, const ExpertTable& table, int first, int tokens) {
  slots_ = call.slots;
  const size_t base = size_t(first) * slots_;
  const int routings = tokens * slots_;
  std::fill(counts_.begin(), counts_.end(), 0);
  for (int r = 0; r < routings; ++r) {  // each address is read once: binding may go on meanwhile
    records_[r] = record(call, table, base + r);
    if (records_[r]) ++counts_[call.id(base + r) + 1];
  }
  groups_used_ = 0;
  for (int e = 0; e < experts_; ++e) {
    const int count = counts_[e + 1];
    if (count > 0) groups_[groups_used_++] = {nullptr, counts_[e], count};
    counts_[e + 1] += counts_[e];
  }
  for (int r = 0; r < routings; ++r) {
    positions_[r] = records_[r] ? counts_[call.id(base + r)]++ : -1;
    if (records_[r]) sorted_[positions_[r]] = r;
  }
  for (int g = 0; g < groups_used_; ++g) groups_[g].record = records_[sorted_[groups_[g].first]];
}

}  // namespace moet
