// x -> quantised rows: section 1 of docs/numerics.md.
#pragma once
#include "layout.cuh"

// --- quantise: one thread a run of 8 elements, four to a block of 32

template <class Act>
MOET_DEVICE void quantise_piece(const QuantiseParams& p, const float (&x)[8], u8* row, u32 block,
                                u32 t) {
  using Row = QuantisedRow<Act>;
  u32 largest = 0;
  for (int i = 0; i < 8; ++i) {
    const u32 magnitude = __float_as_uint(x[i]) & 0x7FFFFFFF;
    largest = magnitude > largest ? magnitude : largest;
  }
  for (int step = 1; step < 4; step *= 2) {
    const u32 other = __shfl_xor_sync(0xFFFFFFFF, largest, step);
    largest = other > largest ? other : largest;
  }
  const u32 be = block_exponent<Act>(largest);
  u32 bytes[2][2] = {};  // [low, high][dword]
  for (int i = 0; i < 8; ++i) {
    const int q = quantised<Act>(x[i], be);
    const int high = Act::slices == 2 ? high_slice(q) : 0;
    const int low = q - 256 * high;
    bytes[0][i / 4] |= (low & 0xFFu) << 8 * (i % 4);
    bytes[1][i / 4] |= (high & 0xFFu) << 8 * (i % 4);
  }
  // Whole warps take part in the exchange above; lanes past the last group store nothing.
  if (block >= p.groups * kGroupBlocks) return;
  u8* at = row + Row::element(block, 8 * t);
  if (Act::slices == 2) {
    *reinterpret_cast<uint2*>(at) = {bytes[1][0], bytes[1][1]};
    at += Row::slice_bytes;
  }
  *reinterpret_cast<uint2*>(at) = {bytes[0][0], bytes[0][1]};
  if (t == 0) Row::store_constants(row, block, block_scale<Act>(be));
}

// Grid: (ceil(16 * groups / 128), T).
MOET_KERNEL(128, 8) moet_quantise(const __grid_constant__ QuantiseParams p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const u32 piece = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
  const u32 block = piece / 4, t = piece % 4;
  float x[8];
  for (u32 i = 0; i < 8; ++i) {
    const u32 k = 8 * piece + i;
    x[i] = k < p.hidden ? widened(p.x, p.x_type, static_cast<u64>(token) * p.hidden + k) : 0.0f;
  }
  const u32 bytes = p.act == 8 ? QuantisedRow<MxInt8>::bytes(p.groups)
                               : QuantisedRow<MxInt16>::bytes(p.groups);
  u8* row = p.rows + static_cast<u64>(token) * bytes;
  if (p.act == 8) quantise_piece<MxInt8>(p, x, row, block, t);
  else quantise_piece<MxInt16>(p, x, row, block, t);
}
