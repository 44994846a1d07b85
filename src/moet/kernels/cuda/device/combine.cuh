// The weighted sum of a token's rows in slot order: section 6 of docs/numerics.md.
#pragma once
#include "layout.cuh"

// --- combine: section 6

constexpr u32 kBatch = 8;  // slots whose rows are loaded before the first is added

// 1: the slot counts, 0: it is skipped, -1: nobody can compute it.
MOET_DEVICE int slot_state(const CombineParams& p, int id) {
  if (id < 0) return 0;
  if (static_cast<u32>(id) >= p.experts) return -1;
  const u64 address = p.table[id];
  if (address == kForeign) return 0;
  return address == kElsewhere && !p.elsewhere ? -1 : 1;
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

// Grid: (ceil(H / 512), T); one thread four elements.
MOET_KERNEL(128, 8) moet_combine(const __grid_constant__ CombineParams p) {
  const u32 first = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  const u64 token = blockIdx.y, slots = token * p.top_k;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (first >= p.hidden) return;
  float sum[4] = {};
  for (u32 begin = 0; begin < p.top_k; begin += kBatch) {
    float4 rows[kBatch];
    int states[kBatch];
#pragma unroll
    for (u32 i = 0; i < kBatch; ++i) {
      const u32 slot = begin + i;
      states[i] = slot < p.top_k ? slot_state(p, p.ids[slots + slot]) : 0;
      rows[i] = float4{0, 0, 0, 0};
      if (states[i] > 0)
        rows[i] = *reinterpret_cast<const float4*>(p.rows + (slots + slot) * p.hidden + first);
    }
#pragma unroll
    for (u32 i = 0; i < kBatch; ++i) {
      if (states[i] == 0) continue;
      const float w = states[i] > 0 ? p.weights[slots + begin + i] : __uint_as_float(kNan);
      sum[0] = __fmaf_rn(w, rows[i].x, sum[0]);
      sum[1] = __fmaf_rn(w, rows[i].y, sum[1]);
      sum[2] = __fmaf_rn(w, rows[i].z, sum[2]);
      sum[3] = __fmaf_rn(w, rows[i].w, sum[3]);
      if (states[i] < 0 && first == 0) atomicAdd(p.status, 1u);
    }
  }
  store_output(p, token * p.hidden + first, sum);
}
