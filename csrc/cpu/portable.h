// The vocabulary in plain C++ (GCC and Clang vectors of four): every target has it. It is the plain
// twin of the fast ones, not a fast path: its fma is the C library's, one call a lane.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

#define MOET_INLINE inline __attribute__((always_inline))

namespace moet {
namespace {

constexpr const char* kName = "portable";
constexpr int kLanes = 4;
constexpr int kTokens = 2;  // tokens that share the decoding of a tile
constexpr bool kSlicesShareTokens = true;

typedef float F __attribute__((vector_size(16)));
typedef uint32_t I __attribute__((vector_size(16)));  // unsigned: wraps by definition
typedef int32_t Signed __attribute__((vector_size(16)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef int16_t Words __attribute__((vector_size(16)));
typedef I Dot;  // running dot products of four u8 x s8, one a lane

template <class To, class From>
MOET_INLINE To reinterpret(From from) {
  To to;
  static_assert(sizeof(to) == sizeof(from));
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// --- fp32
MOET_INLINE F load(const float* p) { F v; __builtin_memcpy(&v, p, sizeof(v)); return v; }
MOET_INLINE void store(float* p, F v) { __builtin_memcpy(p, &v, sizeof(v)); }
MOET_INLINE F set(float x) { return F{x, x, x, x}; }
MOET_INLINE F add(F a, F b) { return a + b; }
MOET_INLINE F sub(F a, F b) { return a - b; }
MOET_INLINE F mul(F a, F b) { return a * b; }
MOET_INLINE F div(F a, F b) { return a / b; }
MOET_INLINE F fma(F a, F b, F c) {
  F r;
  for (int i = 0; i < kLanes; ++i) r[i] = ::fmaf(a[i], b[i], c[i]);
  return r;
}
// x > limit ? limit : x and x < limit ? limit : x: NaN passes.
MOET_INLINE F cap(F x, F limit) { return x > limit ? limit : x; }
MOET_INLINE F floor_at(F x, F limit) { return x < limit ? limit : x; }

// --- int32
MOET_INLINE I set_int(int32_t x) { const uint32_t u = uint32_t(x); return I{u, u, u, u}; }
MOET_INLINE I bits(F x) { return reinterpret<I>(x); }
MOET_INLINE F from_bits(I x) { return reinterpret<F>(x); }
MOET_INLINE F to_float(I x) { return __builtin_convertvector(reinterpret<Signed>(x), F); }
MOET_INLINE I add(I a, I b) { return a + b; }
MOET_INLINE I sub(I a, I b) { return a - b; }
MOET_INLINE I both(I a, I b) { return a & b; }
template <int n> MOET_INLINE I shift_left(I x) { return x << n; }
template <int n> MOET_INLINE I shift_right(I x) { return x >> n; }  // logical
template <int n> MOET_INLINE I shift_right_signed(I x) {
  return reinterpret<I>(reinterpret<Signed>(x) >> n);
}
MOET_INLINE I max_unsigned(I a, I b) { return a > b ? a : b; }
MOET_INLINE uint32_t max_lane(I x) {
  uint32_t m = x[0];
  for (int i = 1; i < kLanes; ++i) m = x[i] > m ? x[i] : m;
  return m;
}
MOET_INLINE I where_nan(F x, I nan, I other) { return x != x ? nan : other; }

// --- weights and dots
MOET_INLINE I load_codes(const uint8_t* p) { I v; __builtin_memcpy(&v, p, sizeof(v)); return v; }
MOET_INLINE I load_scales(const uint8_t* p) { return I{p[0], p[1], p[2], p[3]}; }
MOET_INLINE I set_dword(const void* p) { int32_t x; __builtin_memcpy(&x, p, 4); return set_int(x); }
MOET_INLINE I low_nibbles(I codes) { return codes & 0x0F0F0F0F; }
MOET_INLINE I high_nibbles(I codes) { return codes >> 4 & 0x0F0F0F0F; }
// w2 + 12 without a table: magnitudes 0 1 2 3 4 5 6 7 are 0 1 2 3 4 6 8 12, bit 3 is the sign.
MOET_INLINE I weights_of(I nibbles) {
  const Bytes code = reinterpret<Bytes>(nibbles), m = code & 7;
  const Bytes w2 = m + (reinterpret<Bytes>(m > 4) & (m - 4)) + (reinterpret<Bytes>(m > 6) & 2);
  const Bytes minus = reinterpret<Bytes>(code > 7);
  return reinterpret<I>(((w2 ^ minus) - minus) + 12);
}
MOET_INLINE Dot dot_start(const void* correction) { return set_dword(correction); }
MOET_INLINE Dot dot_zero() { return set_int(0); }
// In 16-bit lanes: even and odd bytes apart, products at most 24 * 128, a pair below 2^13.
MOET_INLINE Dot dot(Dot sum, I weights, I q) {
  const Words w = reinterpret<Words>(weights), x = reinterpret<Words>(q);
  const Words pairs = (w & 0xFF) * (x << 8 >> 8) + (w >> 8) * (x >> 8);
  const Signed p = reinterpret<Signed>(pairs);
  return sum + reinterpret<I>((p << 16 >> 16) + (p >> 16));
}
MOET_INLINE I dot_finish(Dot sum) { return sum; }
MOET_INLINE int32_t dot_negated(Dot sum) { return int32_t(0u - sum[0]); }

// --- packing. q: 32 int32 of one block in order. Bytes out: for each j, k = 8j, 8j+2, 8j+4, 8j+6,
// then 8j+1, 8j+3, 8j+5, 8j+7: the dwords that meet the low and the high nibbles of dword j.
MOET_INLINE void store_block(int8_t* out, const I (&q)[kBlock / kLanes]) {
  for (int k = 0; k < kBlock; ++k)
    out[(k & ~7) + 4 * (k & 1) + (k % 8 >> 1)] = int8_t(q[k / kLanes][k % kLanes]);
}

// --- 16-bit floats
MOET_INLINE F load_bf16(const uint16_t* p) { return from_bits(I{p[0], p[1], p[2], p[3]} << 16); }

inline uint32_t bits_of_half(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3FF;
  if (exponent == 31) return sign | 0x7F800000 | mantissa << 13;
  if (exponent > 0) return sign | (exponent + 112) << 23 | mantissa << 13;
  const float value = float(mantissa) * 0x1p-24f;  // exact and normal, or zero
  return sign | reinterpret<uint32_t>(value);
}
MOET_INLINE F load_half(const uint16_t* p) {
  I x;
  for (int i = 0; i < kLanes; ++i) x[i] = bits_of_half(p[i]);
  return from_bits(x);
}

// To nearest, ties to even; NaN is 0x7FFF.
inline uint16_t half_of_bits(uint32_t x) {
  const uint32_t sign = x >> 16 & 0x8000, magnitude = x & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return 0x7FFF;
  if (magnitude >= 0x47800000) return uint16_t(sign | 0x7C00);  // 65536 and above
  if (magnitude >= 0x38800000) {                                // 2^-14: normal, may round to inf
    const uint32_t rebased = magnitude - (112u << 23);
    return uint16_t(sign | (rebased + 0xFFF + (rebased >> 13 & 1)) >> 13);
  }
  // Units of 2^-24; adding 1.5 * 2^23 leaves the rounded integer in the low bits.
  const float rounded = reinterpret<float>(magnitude) * 0x1p24f + 12582912.0f;
  return uint16_t(sign | (reinterpret<uint32_t>(rounded) - 0x4B400000));
}
MOET_INLINE void store_low_halves(uint16_t* p, I x) {
  for (int i = 0; i < kLanes; ++i) p[i] = uint16_t(x[i]);
}
MOET_INLINE void store_half(uint16_t* p, F x) {
  for (int i = 0; i < kLanes; ++i) p[i] = half_of_bits(bits(x)[i]);
}

// --- the strip's end: lane l holds row (l >> 1) + 8 * (l & 1)
MOET_INLINE void store_rows(float* out, const F (&lanes)[kTileRows / kLanes]) {
  for (int l = 0; l < kTileRows; ++l) out[(l >> 1) + 8 * (l & 1)] = lanes[l / kLanes][l % kLanes];
}

MOET_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

}  // namespace
}  // namespace moet
