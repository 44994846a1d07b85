#include "step.h"

#include <algorithm>
#include <cstring>

namespace moet {
namespace {

constexpr size_t kItemBytes = 64 << 10;  // weights of an item: long enough to stream, short to steal
constexpr int kItemsAWorker = 8;         // a step has at least so many items a worker, if it can
constexpr int kTokensAStrip = 64;        // vectors of one kernel call; bounds the scratch on the stack
constexpr size_t kWorthWaking = 2 << 20;  // weights met: about 100 us of one core, two wake-ups
constexpr int kCombineColumns = 512;     // columns of a combine item where tokens are few

int items(int units, int units_an_item) { return (units + units_an_item - 1) / units_an_item; }

// Units (strips or pairs of them) an item: about kItemBytes of weights, less where many tokens share
// them, never so many that workers would have to wait for each other or the board would overflow.
int units_an_item(int units, size_t unit_bytes, int tokens, int least_items) {
  const size_t bytes = kItemBytes / std::max(1, tokens / 4);
  const int by_size = int(std::max<size_t>(1, bytes / unit_bytes));
  const int by_share = std::max(1, units / least_items);
  return std::max(std::min(by_size, by_share), items(units, int(kMaxItems)));
}

}  // namespace

Step::Step(const LayerShape& shape, const Kernels& kernels)
    : shape_(shape),
      layout_{shape.hidden, shape.intermediate, shape.biased},
      kernels_(kernels),
      x_stride_(quantised_bytes(layout_.hidden_blocks(), shape.act)),
      h_stride_(quantised_bytes(layout_.intermediate_blocks(), shape.act)),
      routing_(shape),
      x_of_(size_t(shape.max_tokens) * shape.top_k),
      h_of_(x_of_.size()),
      cuts_(new Cut[std::min<size_t>(shape.experts, x_of_.size())]) {}

size_t Step::workspace_bytes() const {
  const size_t routings = x_of_.size();
  const size_t floats = routings * (size_t(shape_.intermediate) + shape_.hidden);
  return shape_.max_tokens * x_stride_ + routings * h_stride_ + floats * sizeof(float);
}

// Every part is a multiple of 64 bytes long, so all of them keep the alignment of the first.
void Step::carve(uint8_t* memory) {
  const size_t routings = x_of_.size();
  xq_ = memory;
  hq_ = xq_ + shape_.max_tokens * x_stride_;
  h_ = reinterpret_cast<float*>(hq_ + routings * h_stride_);
  rows_ = h_ + routings * shape_.intermediate;
}

void Step::prepare(const Call& call, const ExpertTable& table, int first, int tokens,
                   const Pool& pool) {
  call_ = call;
  first_ = first;
  tokens_ = tokens;
  routing_.sort(call, table, first, tokens);
  groups_ = routing_.groups();
  carve(pool.workspace());
  point();
  for (int g = 0; g < groups_; ++g) cut(g, pool.threads());
  cut_combine(pool.threads());
}

// Sets the addresses that the strips' kernels take, in sorted order.
void Step::point() {
  for (int g = 0; g < groups_; ++g) {
    const Group& group = routing_.group(g);
    for (int p = group.first; p < group.first + group.count; ++p) {
      x_of_[p] = xq_ + routing_.token(p) * x_stride_;
      h_of_[p] = hq_ + p * h_stride_;
    }
  }
}

void Step::cut(int g, int threads) {
  const int tokens = routing_.group(g).count;
  const int least = items(kItemsAWorker * threads, groups_);
  cuts_[g].pairs_an_item = units_an_item(layout_.pairs(), layout_.pair_bytes(), tokens, least);
  cuts_[g].downs_an_item = units_an_item(layout_.downs(), layout_.down_bytes(), tokens, least);
}

// Whole tokens where they are many; otherwise columns, a multiple of 16.
void Step::cut_combine(int threads) {
  int parts = items(shape_.hidden, kCombineColumns);
  if (tokens_ >= kItemsAWorker * threads) parts = 1;
  parts = std::max(1, std::min(parts, int(kMaxItems) / tokens_));
  combine_columns_ = items(items(shape_.hidden, parts), kTileRows) * kTileRows;
  combine_parts_ = items(shape_.hidden, combine_columns_);
}

int Step::up_items(int g) const { return items(layout_.pairs(), cuts_[g].pairs_an_item); }
int Step::down_items(int g) const { return items(layout_.downs(), cuts_[g].downs_an_item); }

// --- the order of the step -----------------------------------------------------------------------

// Weights are met once by up to four tokens at the price of reading them, then once again.
bool Step::worth_waking() const {
  size_t met = 0;
  for (int g = 0; g < groups_; ++g)
    met += layout_.record() * size_t(items(routing_.group(g).count, 4));
  return met >= kWorthWaking;
}

bool Step::begin(Pool& pool) noexcept {
  groups_left_.store(groups_, std::memory_order_relaxed);
  quantises_left_.store(tokens_, std::memory_order_relaxed);
  if (groups_ == 0) {  // every slot is skipped: zeros
    if (call_.rows) return false;
    publish_combine(pool);
    return true;
  }
  pool.publish(groups_, kQuantise, uint32_t(tokens_));
  pool.announce();
  return true;
}

bool Step::finished(const Claim& claim, Pool& pool) noexcept {
  switch (claim.phase) {
    case kQuantise:
      if (quantises_left_.fetch_sub(1) == 1) publish_ups(pool);
      return false;
    case kUp:
      if (cuts_[claim.slot].left.fetch_sub(1) == 1) publish_downs(claim.slot, pool);
      return false;
    case kDown:
      if (cuts_[claim.slot].left.fetch_sub(1) != 1 || groups_left_.fetch_sub(1) != 1) return false;
      if (call_.rows) return true;
      publish_combine(pool);
      return false;
    default:
      return combines_left_.fetch_sub(1) == 1;
  }
}

// The last publication hands the step over: it may end before the next line runs. Hence the copy.
void Step::publish_ups(Pool& pool) noexcept {
  const int groups = groups_;
  for (int g = 0; g < groups; ++g) {
    const int count = up_items(g);
    cuts_[g].left.store(count, std::memory_order_relaxed);
    pool.publish(g, kUp, uint32_t(count));
  }
  pool.announce();
}

void Step::publish_downs(int g, Pool& pool) noexcept {
  quantise_h(routing_.group(g));
  const int count = down_items(g);
  cuts_[g].left.store(count, std::memory_order_relaxed);
  pool.publish(g, kDown, uint32_t(count));
  pool.announce();
}

void Step::publish_combine(Pool& pool) noexcept {
  const int count = combine_items();
  combines_left_.store(count, std::memory_order_relaxed);
  pool.publish(groups_, kCombine, uint32_t(count));
  pool.announce();
}

// --- the work of an item -------------------------------------------------------------------------

void Step::work(const Claim& claim, int) {
  ran_isa_.store(kernels_.name, std::memory_order_relaxed);
  switch (claim.phase) {
    case kQuantise: return quantise_token(int(claim.item));
    case kUp: return up(claim.slot, claim.item);
    case kDown: return down(claim.slot, claim.item);
    default: return combine(claim.item);
  }
}

void Step::quantise_token(int token) const {
  if (!routing_.meets(token)) return;  // nobody reads it
  const size_t bytes = shape_.hidden * dtype_bytes(call_.x_type);
  kernels_.quantise(call_.x + size_t(first_ + token) * bytes, call_.x_type, shape_.hidden,
                    shape_.act, xq_ + token * x_stride_);
}

const float* Step::bias(const Group& group, size_t offset) const {
  return shape_.biased ? reinterpret_cast<const float*>(group.record + offset) : nullptr;
}

void Step::up(int g, uint32_t item) const {
  const int each = cuts_[g].pairs_an_item;
  const int begin = int(item) * each, end = std::min(begin + each, layout_.pairs());
  for (int pair = begin; pair < end; ++pair) up_pair(routing_.group(g), pair);
}

// h[16 * pair ..] of every routing of the group.
void Step::up_pair(const Group& group, int pair) const {
  alignas(64) float gate[kTokensAStrip * kTileRows], up[kTokensAStrip * kTileRows];
  const int blocks = layout_.hidden_blocks(), column = pair * kTileRows;
  const float* gate_bias = bias(group, layout_.gate_bias() + sizeof(float) * column);
  const float* up_bias = bias(group, layout_.up_bias() + sizeof(float) * column);
  for (int done = 0; done < group.count; done += kTokensAStrip) {
    const int first = group.first + done, m = std::min(kTokensAStrip, group.count - done);
    kernels_.strip(group.record + layout_.gate(pair), blocks, &x_of_[first], m, shape_.act, gate);
    kernels_.strip(group.record + layout_.up(pair), blocks, &x_of_[first], m, shape_.act, up);
    for (int j = 0; j < m; ++j)
      kernels_.gate(shape_.gate, gate + j * kTileRows, up + j * kTileRows, gate_bias, up_bias,
                    kTileRows, h_ + size_t(first + j) * shape_.intermediate + column);
  }
}

void Step::quantise_h(const Group& group) const {
  for (int p = group.first; p < group.first + group.count; ++p)
    kernels_.quantise(h_ + size_t(p) * shape_.intermediate, DType::kF32, shape_.intermediate,
                      shape_.act, hq_ + p * h_stride_);
}

// Rows [16 * begin .. 16 * end) of every routing of the group, finished.
void Step::down(int g, uint32_t item) const {
  alignas(64) float tot[kTokensAStrip * kTileRows];
  const Group& group = routing_.group(g);
  const int each = cuts_[g].downs_an_item;
  const int begin = int(item) * each, end = std::min(begin + each, layout_.downs());
  for (int strip = begin; strip < end; ++strip)
    for (int done = 0; done < group.count; done += kTokensAStrip) {
      const int first = group.first + done, m = std::min(kTokensAStrip, group.count - done);
      kernels_.strip(group.record + layout_.down(strip), layout_.intermediate_blocks(),
                     &h_of_[first], m, shape_.act, tot);
      for (int j = 0; j < m; ++j)
        std::memcpy(rows_ + size_t(first + j) * shape_.hidden + strip * kTileRows,
                    tot + j * kTileRows, kTileRows * sizeof(float));
    }
  const int column = begin * kTileRows, columns = (end - begin) * kTileRows;
  const float* down_bias = bias(group, layout_.down_bias() + sizeof(float) * column);
  for (int p = group.first; p < group.first + group.count; ++p)
    kernels_.finish_row(rows_ + size_t(p) * shape_.hidden + column, down_bias, columns,
                        shape_.rows_bf16);
  if (call_.rows)
    for (int p = group.first; p < group.first + group.count; ++p) hand_over_row(p, column, columns);
}

// Finished columns of a row to where the caller wants them. A row that was rounded to bf16 is that
// already, in the upper half of its floats.
void Step::hand_over_row(int p, int column, int columns) const {
  const float* from = rows_ + size_t(p) * shape_.hidden + column;
  const size_t routing = size_t(first_) * call_.slots + routing_.routing(p);
  const size_t at = routing * shape_.hidden + column;
  columns = std::min(columns, shape_.hidden - column);
  if (!shape_.rows_bf16) {
    std::memcpy(call_.rows + at * sizeof(float), from, columns * sizeof(float));
    return;
  }
  uint16_t* to = reinterpret_cast<uint16_t*>(call_.rows) + at;
  for (int i = 0; i < columns; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof bits);
    to[i] = uint16_t(bits >> 16);
  }
}

void Step::combine(uint32_t item) const {
  const float* rows[kMaxTopK];
  const int token = int(item) / combine_parts_, part = int(item) % combine_parts_;
  const int column = part * combine_columns_;
  const int columns = std::min(combine_columns_, shape_.hidden - column);
  for (int s = 0; s < call_.slots; ++s) {
    const int p = routing_.position(token, s);
    rows[s] = p < 0 ? nullptr : rows_ + size_t(p) * shape_.hidden + column;
  }
  const size_t out = size_t(first_ + token) * shape_.hidden + column;
  kernels_.combine(rows, call_.weights + size_t(first_ + token) * call_.slots, call_.slots, columns,
                   call_.scale, call_.has_scale, call_.out_type,
                   call_.out + out * dtype_bytes(call_.out_type));
}

}  // namespace moet
