// The vocabulary for AVX2, FMA and F16C: eight lanes, two vectors a tile.
//
// There is no dot of four bytes here, but there is one of two (maddubs, saturating to 16 bits). A
// Dot holds 16-bit sums, bytes 0 and 1 of a dword in the low half, bytes 2 and 3 in the high one.
// With weights w2 + 12 in 0..24 a pair is at most 24 * 2 * 128 = 6,144: maddubs never saturates.
// Nor does a sum overflow: it starts from the correction -12 * sum(q) over its 16 products, and each
// product (w2 + 12) * q turns one -12 * q into w2 * q, so all along it stays within
// 16 * 12 * 128 = 24,576. Only the end of a block widens to 32 bits.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "kernels.h"

#define MOET_INLINE inline __attribute__((always_inline))

namespace moet {
namespace {

constexpr const char* kName = "avx2";
constexpr int kLanes = 8;
constexpr int kTokens = 4;  // tokens that share the decoding of a tile
constexpr bool kSlicesShareTokens = true;

typedef __m256 F;
typedef __m256i I;
struct Dot {
  __m256i pairs;
};

// --- fp32
MOET_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
MOET_INLINE void store(float* p, F v) { _mm256_storeu_ps(p, v); }
MOET_INLINE F set(float x) { return _mm256_set1_ps(x); }
MOET_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
MOET_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
MOET_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
MOET_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
MOET_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
// x > limit ? limit : x and x < limit ? limit : x. The limit comes FIRST: NaN in x passes.
MOET_INLINE F cap(F x, F limit) { return _mm256_min_ps(limit, x); }
MOET_INLINE F floor_at(F x, F limit) { return _mm256_max_ps(limit, x); }

// --- int32
MOET_INLINE I set_int(int32_t x) { return _mm256_set1_epi32(x); }
MOET_INLINE I bits(F x) { return _mm256_castps_si256(x); }
MOET_INLINE F from_bits(I x) { return _mm256_castsi256_ps(x); }
MOET_INLINE F to_float(I x) { return _mm256_cvtepi32_ps(x); }
MOET_INLINE I add(I a, I b) { return _mm256_add_epi32(a, b); }
MOET_INLINE I sub(I a, I b) { return _mm256_sub_epi32(a, b); }
MOET_INLINE I both(I a, I b) { return _mm256_and_si256(a, b); }
template <int n> MOET_INLINE I shift_left(I x) { return _mm256_slli_epi32(x, n); }
template <int n> MOET_INLINE I shift_right(I x) { return _mm256_srli_epi32(x, n); }
template <int n> MOET_INLINE I shift_right_signed(I x) { return _mm256_srai_epi32(x, n); }
MOET_INLINE I max_unsigned(I a, I b) { return _mm256_max_epu32(a, b); }
MOET_INLINE uint32_t max_lane(I x) {
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4E));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xB1));
  return uint32_t(_mm_cvtsi128_si32(m));
}
MOET_INLINE I where_nan(F x, I nan, I other) {
  return _mm256_blendv_epi8(other, nan, bits(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}

// --- weights and dots
MOET_INLINE I load_codes(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
MOET_INLINE I load_scales(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
MOET_INLINE I set_dword(const void* p) {
  int32_t x;
  __builtin_memcpy(&x, p, sizeof(x));
  return set_int(x);
}
MOET_INLINE I low_nibbles(I codes) { return _mm256_and_si256(codes, _mm256_set1_epi8(15)); }
MOET_INLINE I high_nibbles(I codes) { return low_nibbles(_mm256_srli_epi16(codes, 4)); }
MOET_INLINE I weights_of(I nibbles) {  // w2 + 12
  const __m128i t = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), nibbles);
}
MOET_INLINE Dot dot_start(const void* correction) { return {set_dword(correction)}; }
MOET_INLINE Dot dot_zero() { return {_mm256_setzero_si256()}; }
MOET_INLINE Dot dot(Dot sum, I weights, I q) {
  sum.pairs = _mm256_add_epi16(sum.pairs, _mm256_maddubs_epi16(weights, q));
  asm("" : "+x"(sum.pairs));  // or GCC regroups the additions into trees and spills the products
  return sum;
}
MOET_INLINE I dot_finish(Dot sum) { return _mm256_madd_epi16(sum.pairs, _mm256_set1_epi16(1)); }
MOET_INLINE int32_t dot_negated(Dot sum) {
  const __m128i pairs = _mm256_castsi256_si128(sum.pairs);
  return _mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), pairs));
}

// --- packing. q: 32 int32 of one block in order. Bytes out: for each j, k = 8j, 8j+2, 8j+4, 8j+6,
// then 8j+1, 8j+3, 8j+5, 8j+7: the dwords that meet the low and the high nibbles of dword j.
MOET_INLINE void store_block(int8_t* out, const I (&q)[kBlock / kLanes]) {
  // The packs work in 128-bit halves and leave dwords of four k's as 0 2 4 6 1 3 5 7.
  const __m256i words = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]),
                                           _mm256_packs_epi32(q[2], q[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i even_odd = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  const __m256i bytes = _mm256_shuffle_epi8(_mm256_permutevar8x32_epi32(words, order), even_odd);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
}

// --- 16-bit floats
MOET_INLINE __m128i load_halves(const uint16_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
MOET_INLINE F load_bf16(const uint16_t* p) {
  return from_bits(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(p)), 16));
}
MOET_INLINE F load_half(const uint16_t* p) { return _mm256_cvtph_ps(load_halves(p)); }
MOET_INLINE void store_low_halves(uint16_t* p, I x) {  // x in 0..65535
  const __m128i h = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), h);
}
MOET_INLINE void store_half(uint16_t* p, F x) {  // NaN is 0x7FFF
  const __m128i h = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
  store_low_halves(p, where_nan(x, set_int(0x7FFF), _mm256_cvtepu16_epi32(h)));
}

// --- the strip's end: lane l holds row (l >> 1) + 8 * (l & 1)
MOET_INLINE void store_rows(float* out, const F (&lanes)[kTileRows / kLanes]) {
  const __m256 even = _mm256_shuffle_ps(lanes[0], lanes[1], 0x88);  // rows 0 1 4 5 2 3 6 7
  const __m256 odd = _mm256_shuffle_ps(lanes[0], lanes[1], 0xDD);
  const auto in_order = [](__m256 v) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xD8));
  };
  store(out, in_order(even));
  store(out + 8, in_order(odd));
}

MOET_INLINE void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

}  // namespace
}  // namespace moet
