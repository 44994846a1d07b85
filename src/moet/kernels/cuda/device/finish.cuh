// What becomes of the sums of a task, one warp doing all of it: h, requantised, or rows of down.
#pragma once
#include "dot.cuh"

// Sums of a task: [segment][column][4 strips of 16 rows], with `stride` floats a segment.
struct Gathered {
  const float* sums;
  u32 stride;
};

// Gate, up and the gate function for 32 rows, one a lane; then h, requantised.
struct GateUp {
  template <class Act>
  MOET_DEVICE void finish(const Stage& s, const Work& w, const Gathered& from) {
#pragma unroll 1
    for (u32 j = 0; j < w.count; ++j) finish_column<Act>(s, w, j, from);
  }

  template <class Act>
  MOET_DEVICE void finish_column(const Stage& s, const Work& w, u32 j, const Gathered& from) {
    using Row = QuantisedRow<Act>;
    const u32 lane = threadIdx.x & 31, unit = w.item.unit;
    const float* first = from.sums + j * kSumStride + (lane >> 4) * 32 + (lane & 15);
    float g = total(s, first, from.stride), u = total(s, first + 16, from.stride);
    if (s.p.bias) {
      const u8* record = reinterpret_cast<const u8*>(s.routing.entries[w.item.entry].record);
      const u32 at = sizeof(float) * (32 * unit + lane);
      g = __fadd_rn(g, *reinterpret_cast<const float*>(record + s.p.bias + at));
      u = __fadd_rn(u, *reinterpret_cast<const float*>(record + s.p.second_bias + at));
    }
    const float h = gated(s.p.gate, s.p.limit, g, u);

    const u32 be =
        block_exponent<Act>(__reduce_max_sync(0xFFFFFFFF, __float_as_uint(h) & 0x7FFFFFFF));
    const int q = quantised<Act>(h, be);
    const u32 routing = w.columns[j] & 0xFFFF;
    u8* row = static_cast<u8*>(s.p.out) + static_cast<u64>(routing) * Row::bytes(s.p.out_size);
    u8* at = row + Row::element(unit, lane);
    if (Act::slices == 1) {
      at[0] = static_cast<u8>(q);
    } else {
      const int high = high_slice(q);
      at[0] = static_cast<u8>(high);
      at[Row::slice_bytes] = static_cast<u8>(q - 256 * high);
    }
    if (lane == 0) Row::store_constants(row, unit, block_scale<Act>(be));
  }
};

// Rows of down, 32 at a time.
struct Down {
  template <class Act>
  MOET_DEVICE void finish(const Stage& s, const Work& w, const Gathered& from) {
    const u32 halves = 2 * w.item.unit + 1 < s.p.pairs ? 2 : 1;
#pragma unroll 1
    for (u32 j = 0; j < halves * w.count; ++j) finish_half<Act>(s, w, j / halves, j % halves, from);
  }

  template <class Act>
  MOET_DEVICE void finish_half(const Stage& s, const Work& w, u32 j, u32 half,
                               const Gathered& from) {
    const u32 at = 32 * half + (threadIdx.x & 31), row = 64 * w.item.unit + at;
    float v = total(s, from.sums + j * kSumStride + at, from.stride);
    if (s.p.bias) {
      const u8* record = reinterpret_cast<const u8*>(s.routing.entries[w.item.entry].record);
      v = __fadd_rn(v, reinterpret_cast<const float*>(record + s.p.bias)[row]);
    }
    if (Act::rows_bf16) v = __uint_as_float(static_cast<u32>(to_bf16(v)) << 16);
    const u64 routing = w.columns[j] & 0xFFFF;
    static_cast<float*>(s.p.out)[routing * s.p.out_size + row] = v;
  }
};
