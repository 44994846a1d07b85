#include "combine.h"

#include <algorithm>
#include <cstring>

#include "step.h"

namespace moet {
namespace {

constexpr int kColumns = 512;             // of an item
constexpr size_t kWorthWaking = 2 << 20;  // bytes of rows: see Step

}  // namespace

RowCombine::RowCombine(const LayerShape& shape, const Kernels& kernels)
    : shape_(shape), kernels_(kernels), parts_((shape.hidden + kColumns - 1) / kColumns) {}

int RowCombine::most_tokens() const { return std::max(1, int(kMaxItems) / parts_); }

void RowCombine::prepare(const Call& call, int first, int tokens) {
  call_ = call;
  first_ = first;
  tokens_ = tokens;
}

bool RowCombine::worth_waking() const {
  return size_t(tokens_) * call_.slots * shape_.hidden * sizeof(float) >= kWorthWaking;
}

bool RowCombine::begin(Pool& pool) noexcept {
  const int items = tokens_ * parts_;
  if (items == 0) return false;
  left_.store(items, std::memory_order_relaxed);
  pool.publish(0, 0, uint32_t(items));
  pool.announce();
  return true;
}

bool RowCombine::finished(const Claim&, Pool&) noexcept { return left_.fetch_sub(1) == 1; }

// Columns of a row as fp32: where they lie, or widened (exactly) into `scratch`.
const float* RowCombine::row(size_t routing, int column, int columns, float* scratch) const {
  const size_t at = routing * shape_.hidden + column;
  if (!shape_.rows_bf16) return reinterpret_cast<const float*>(call_.rows) + at;
  const uint16_t* from = reinterpret_cast<const uint16_t*>(call_.rows) + at;
  for (int i = 0; i < columns; ++i) {
    const uint32_t bits = uint32_t(from[i]) << 16;
    std::memcpy(scratch + i, &bits, sizeof bits);
  }
  return scratch;
}

void RowCombine::work(const Claim& claim, int) {
  alignas(64) float scratch[kMaxTopK][kColumns];
  const float* rows[kMaxTopK];
  const size_t token = size_t(first_) + claim.item / parts_;
  const int column = int(claim.item % parts_) * kColumns;
  const int columns = std::min(kColumns, shape_.hidden - column);
  for (int s = 0; s < call_.slots; ++s) {
    const size_t routing = token * call_.slots + s;
    rows[s] = call_.id(routing) < 0 ? nullptr : row(routing, column, columns, scratch[s]);
  }
  kernels_.combine(rows, call_.weights + token * call_.slots, call_.slots, columns, call_.scale,
                   call_.has_scale, call_.out_type,
                   call_.out + (token * shape_.hidden + column) * dtype_bytes(call_.out_type));
}

}  // namespace moet
