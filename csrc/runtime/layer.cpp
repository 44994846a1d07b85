#include "layer.h"

#include <algorithm>
#include <cmath>

#include "../core/refusal.h"
#include "isa.h"

namespace moet {
namespace {

constexpr uintptr_t kRecordAlignment = 64;
constexpr int kMaxWidth = 1 << 20;

[[noreturn]] void refuse(const char* what, int64_t value, const char* hint) {
  throw Refusal(std::string(what) + " = " + std::to_string(value), hint);
}

void check_range(const char* what, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  refuse(what, value, ("allowed: " + std::to_string(low) + " to " + std::to_string(high)).c_str());
}

void check_width(const char* what, int value) {
  check_range(what, value, kBlock, kMaxWidth);
  if (value % kBlock) refuse(what, value, "MXFP4 experts need whole blocks of 32");
}

const LayerShape& checked(const LayerShape& s) {
  check_width("hidden", s.hidden);
  check_width("intermediate", s.intermediate);
  check_range("experts", s.experts, 1, kMaxSlots - 1);
  check_range("top_k", s.top_k, 1, kMaxTopK);
  check_range("max_tokens", s.max_tokens, 1, kMaxItems);
  if (std::isnan(s.gate.limit) || s.gate.limit <= 0)
    throw Refusal("limit = " + std::to_string(s.gate.limit), "a positive number, or none");
  return s;
}

void check_address(const char* what, const void* address, size_t alignment) {
  if (!address) throw Refusal(std::string(what) + " has no address", "pass the address of its first element");
  if (reinterpret_cast<uintptr_t>(address) % alignment)
    throw Refusal(std::string(what) + " is not aligned to its element size");
}

}  // namespace

Layer::Layer(std::shared_ptr<Pool> pool, const std::string& isa, const LayerShape& shape)
    : pool_(std::move(pool)),
      shape_(checked(shape)),
      step_(shape_, find_kernels(isa)),
      combine_(shape_, find_kernels(isa)),
      table_(new std::atomic<uintptr_t>[shape.experts]) {
  for (int e = 0; e < shape_.experts; ++e) table_[e].store(kUnbound);
  pool_->reserve(step_.workspace_bytes());
}

size_t Layer::record_bytes() const {
  return RecordLayout{shape_.hidden, shape_.intermediate, shape_.biased}.record();
}

std::atomic<uintptr_t>& Layer::entry(int expert) {
  check_range("expert", expert, 0, shape_.experts - 1);
  return table_[expert];
}

void Layer::bind(int expert, uintptr_t record) {
  std::atomic<uintptr_t>& slot = entry(expert);
  if (record == 0 || record % kRecordAlignment)
    throw Refusal("the record of expert " + std::to_string(expert) + " is not at a 64-byte boundary",
                  "records lie at multiples of 4096 bytes in their arena");
  slot.store(record, std::memory_order_release);
}

void Layer::unbind(int expert) { entry(expert).store(kUnbound); }

void Layer::mark_foreign(int expert) { entry(expert).store(kForeign); }

void Layer::check(const Call& call) const {
  check_range("tokens", call.tokens, 0, INT32_MAX / kMaxTopK);
  check_range("slots", call.slots, 1, shape_.top_k);
  if (call.tokens == 0) return;
  check_address("x", call.x, dtype_bytes(call.x_type));
  check_address("ids", call.ids, call.id_type == IdType::kI32 ? 4 : 8);
  if (call.rows) {
    check_address("rows", call.rows, shape_.rows_bf16 ? 2 : 4);
  } else {
    check_output(call);
  }
  step_.routing().check(call, table_);
}

void Layer::check_output(const Call& call) const {
  check_address("weights", call.weights, sizeof(float));
  check_address("out", call.out, dtype_bytes(call.out_type));
}

void Layer::run(const Call& call) {
  const Pool::Session session(*pool_);
  check(call);
  for (int first = 0; first < call.tokens; first += shape_.max_tokens) {
    step_.prepare(call, table_, first, std::min(shape_.max_tokens, call.tokens - first), *pool_);
    pool_->run(session, step_);
  }
}

void Layer::combine_rows(const Call& call) {
  const Pool::Session session(*pool_);
  check_range("tokens", call.tokens, 0, INT32_MAX / kMaxTopK);
  check_range("slots", call.slots, 1, shape_.top_k);
  if (call.tokens == 0) return;
  check_address("rows", call.rows, shape_.rows_bf16 ? 2 : 4);
  check_address("ids", call.ids, call.id_type == IdType::kI32 ? 4 : 8);
  check_output(call);
  const int most = combine_.most_tokens();
  for (int first = 0; first < call.tokens; first += most) {
    combine_.prepare(call, first, std::min(most, call.tokens - first));
    pool_->run(session, combine_);
  }
}

}  // namespace moet
