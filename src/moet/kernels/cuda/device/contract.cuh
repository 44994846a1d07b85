// docs/numerics.md on a GPU: every fp32 step is an explicit intrinsic, in the written order.
#pragma once
#include "vocabulary.cuh"

constexpr u32 kNan = 0x7FFFFFFF;
constexpr u32 kCeiling = 238;  // largest be of a block that is not poisoned
constexpr int kSegmentBlocks = 16;
constexpr int kGroupBlocks = 4;

// An integer MMA that starts here leaves the bits of the float kMagic + d (section 3).
constexpr int kMagicBits = 0x4B400000;
constexpr float kMagic = 12582912.0f;

enum DType : u32 { kF32 = 0, kBF16 = 1, kF16 = 2 };
enum Gate : u32 { kSilu = 0, kGptOss = 1, kGeluTanh = 2 };

struct MxInt8 {
  static constexpr int slices = 1;
  static constexpr u32 carry = 0x1FFFF, unit = 133, floor = 8;
  static constexpr bool rows_bf16 = true;
};
struct MxInt16 {
  static constexpr int slices = 2;
  static constexpr u32 carry = 0x101FF, unit = 141, floor = 16;
  static constexpr bool rows_bf16 = false;
};

// --- section 1: quantisation

template <class Act>
MOET_DEVICE u32 block_exponent(u32 largest_magnitude) {
  const u32 be = (largest_magnitude + Act::carry) >> 23;
  return be < Act::floor ? Act::floor : be;
}

template <class Act>
MOET_DEVICE int quantised(float x, u32 be) {
  if (be > kCeiling) return 0;
  const float inv = __uint_as_float((Act::unit + 127 - be) << 23);
  // Adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the low bits.
  return __float_as_int(__fadd_rn(__fmul_rn(x, inv), kMagic)) - kMagicBits;
}

MOET_DEVICE int high_slice(int q) { return (q + 128) >> 8; }

template <class Act>
MOET_DEVICE float block_scale(u32 be) {
  return be > kCeiling ? __uint_as_float(kNan) : __uint_as_float((be - Act::unit + 126) << 23);
}

// --- section 5: exp and the gates

MOET_DEVICE float at_most(float x, float limit) { return x > limit ? limit : x; }
MOET_DEVICE float at_least(float x, float limit) { return x < limit ? limit : x; }

MOET_DEVICE float exponential(float x) {
  x = at_least(at_most(x, 87.0f), -87.0f);
  const float z = __fmaf_rn(x, 0x1.715476p+0f, kMagic);
  const float n = __fadd_rn(z, -kMagic);
  float r = __fmaf_rn(n, -0x1.62e43p-1f, x);
  r = __fmaf_rn(n, 0x1.05c61p-29f, r);
  float p = 0x1.6a515cp-10f;
  p = __fmaf_rn(p, r, 0x1.12397ep-7f);
  p = __fmaf_rn(p, r, 0x1.5558acp-5f);
  p = __fmaf_rn(p, r, 0x1.555492p-3f);
  p = __fmaf_rn(p, r, 0x1.fffffcp-2f);
  p = __fmaf_rn(p, r, 1.0f);
  p = __fmaf_rn(p, r, 1.0f);
  return __uint_as_float(__float_as_uint(p) + (__float_as_uint(z) << 23));
}

// RN(a / RN(1 + E(-z)))
MOET_DEVICE float over_one_plus_exp(float a, float z) {
  return __fdiv_rn(a, __fadd_rn(1.0f, exponential(-z)));
}

MOET_DEVICE float gated(u32 kind, float limit, float g, float u) {
  g = at_most(g, limit);
  u = at_least(at_most(u, limit), -limit);
  if (kind == kSilu) {
    const float a = at_least(g, -87.0f);
    return __fmul_rn(over_one_plus_exp(a, a), u);
  }
  if (kind == kGptOss) {
    const float a = at_least(g, -51.0f);
    const float y = over_one_plus_exp(a, __fmul_rn(0x1.b3b646p+0f, a));
    return __fmul_rn(__fadd_rn(u, 1.0f), y);
  }
  const float a = at_least(g, -9.0f);
  const float c = __fmaf_rn(__fmul_rn(a, a), 0x1.2444f2p-4f, 0x1.988454p+0f);
  return __fmul_rn(over_one_plus_exp(a, __fmul_rn(c, a)), u);
}

// --- section 6: rounding to storage types, NaN canonical

MOET_DEVICE bool is_nan(float x) { return (__float_as_uint(x) & 0x7FFFFFFF) > 0x7F800000; }

MOET_DEVICE u16 to_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  return is_nan(x) ? 0x7FFF : static_cast<u16>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

MOET_DEVICE u16 to_half(float x) { return is_nan(x) ? 0x7FFF : float_to_half(x); }

MOET_DEVICE float canonical(float x) { return is_nan(x) ? __uint_as_float(kNan) : x; }

MOET_DEVICE float widened(const void* x, u32 type, u64 i) {
  if (type == kF32) return static_cast<const float*>(x)[i];
  const u16 half = static_cast<const u16*>(x)[i];
  return type == kBF16 ? __uint_as_float(static_cast<u32>(half) << 16) : half_to_float(half);
}
