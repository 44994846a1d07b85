// The weighted sum of a token's rows in slot order: section 6 of docs/numerics.md.
#pragma once
#include "layout.cuh"

constexpr u32 kBatch = 8;  // slots whose rows are loaded before the first is added

enum SlotState { kImpossible = -1, kSkipped = 0, kOnCard = 1, kFromHost = 2 };

MOET_DEVICE SlotState slot_state(const CombineParams& p, int id) {
  if (id < 0) return kSkipped;
  if (static_cast<u32>(id) >= p.experts) return kImpossible;
  const u64 address = p.table[id];
  if (address == kForeign) return kSkipped;
  if (address != kElsewhere || p.elsewhere == kInRows) return kOnCard;
  return p.elsewhere == kOnHost ? kFromHost : kImpossible;
}

// What the routing says of some slots: older than the kernels that the rows are waited for.
struct Slots {
  SlotState states[kBatch];
  float weights[kBatch];
};

MOET_DEVICE Slots read_slots(const CombineParams& p, u64 slots, u32 begin) {
  Slots s;
#pragma unroll
  for (u32 i = 0; i < kBatch; ++i) {
    const bool there = begin + i < p.top_k;
    s.states[i] = there ? slot_state(p, p.ids[slots + begin + i]) : kSkipped;
    s.weights[i] = there ? p.weights[slots + begin + i] : 0.0f;
  }
  return s;
}

// Four elements of a row that the CPU has left in host memory.
MOET_DEVICE float4 host_row(const CombineParams& p, u64 at) {
  if (!p.host_bf16) return load_host(reinterpret_cast<const float4*>(p.host_rows + 4 * at));
  const uint2 v = load_host(reinterpret_cast<const uint2*>(p.host_rows + 2 * at));
  return float4{__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xFFFF0000),
                __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xFFFF0000)};
}

template <class T>
MOET_DEVICE void store_four(void* out, u64 at, T a, T b, T c, T d) {
  T* to = static_cast<T*>(out) + at;
  to[0] = a, to[1] = b, to[2] = c, to[3] = d;
}

MOET_DEVICE void store_output(const CombineParams& p, u64 at, float (&v)[4]) {
  if (p.has_scale)
    for (int i = 0; i < 4; ++i) v[i] = __fmul_rn(p.scale, v[i]);
  if (p.out_type == kBF16)
    store_four<u16>(p.out, at, to_bf16(v[0]), to_bf16(v[1]), to_bf16(v[2]), to_bf16(v[3]));
  else if (p.out_type == kF16)
    store_four<u16>(p.out, at, to_half(v[0]), to_half(v[1]), to_half(v[2]), to_half(v[3]));
  else
    store_four<float>(p.out, at, canonical(v[0]), canonical(v[1]), canonical(v[2]),
                      canonical(v[3]));
}

// Adds the rows of some slots. A slot that nobody can compute makes the sum NaN.
MOET_DEVICE void add_rows(const CombineParams& p, Slots& s, u64 routing, u32 first, float (&sum)[4]) {
  const bool host_failed = p.elsewhere == kOnHost && *p.failed != 0;
  float4 rows[kBatch];
#pragma unroll
  for (u32 i = 0; i < kBatch; ++i) {
    const u64 at = (routing + i) * p.hidden + first;
    if (s.states[i] == kFromHost && host_failed) s.states[i] = kImpossible;
    rows[i] = float4{0, 0, 0, 0};
    if (s.states[i] == kOnCard) rows[i] = *reinterpret_cast<const float4*>(p.rows + at);
    if (s.states[i] == kFromHost) rows[i] = host_row(p, at);
  }
#pragma unroll
  for (u32 i = 0; i < kBatch; ++i) {
    if (s.states[i] == kSkipped) continue;
    const float w = s.states[i] > 0 ? s.weights[i] : __uint_as_float(kNan);
    sum[0] = __fmaf_rn(w, rows[i].x, sum[0]);
    sum[1] = __fmaf_rn(w, rows[i].y, sum[1]);
    sum[2] = __fmaf_rn(w, rows[i].z, sum[2]);
    sum[3] = __fmaf_rn(w, rows[i].w, sum[3]);
    if (s.states[i] < 0 && first == 0) atomicAdd(p.status, 1u);
  }
}

// Grid: (ceil(H / 512), T); one thread four elements.
MOET_KERNEL(128, 8) moet_combine(const __grid_constant__ CombineParams p) {
  const u32 first = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  const u64 token = blockIdx.y, slots = token * p.top_k;
  Slots batch = read_slots(p, slots, 0);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (first >= p.hidden) return;
  float sum[4] = {};
  add_rows(p, batch, slots, first, sum);
  for (u32 begin = kBatch; begin < p.top_k; begin += kBatch) {
    batch = read_slots(p, slots, begin);
    add_rows(p, batch, slots + begin, first, sum);
  }
  store_output(p, token * p.hidden + first, sum);
}
