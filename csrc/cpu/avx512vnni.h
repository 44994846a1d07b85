// The vocabulary for AVX-512 with VNNI: sixteen lanes, one vector a tile.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "kernels.h"

#define MOET_INLINE inline __attribute__((always_inline))

namespace moet {
namespace {

constexpr const char* kName = "avx512vnni";
constexpr int kLanes = 16;
constexpr int kTokens = 8;  // tokens that share the decoding of a tile
constexpr bool kSlicesShareTokens = false;

typedef __m512 F;
typedef __m512i I;
struct Dot {
  __m512i sums;
};

// --- fp32
MOET_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
MOET_INLINE void store(float* p, F v) { _mm512_storeu_ps(p, v); }
MOET_INLINE F set(float x) { return _mm512_set1_ps(x); }
MOET_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
MOET_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
MOET_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
MOET_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
MOET_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
// x > limit ? limit : x and x < limit ? limit : x. The limit comes FIRST: NaN in x passes.
MOET_INLINE F cap(F x, F limit) { return _mm512_min_ps(limit, x); }
MOET_INLINE F floor_at(F x, F limit) { return _mm512_max_ps(limit, x); }

// --- int32
MOET_INLINE I set_int(int32_t x) { return _mm512_set1_epi32(x); }
MOET_INLINE I bits(F x) { return _mm512_castps_si512(x); }
MOET_INLINE F from_bits(I x) { return _mm512_castsi512_ps(x); }
MOET_INLINE F to_float(I x) { return _mm512_cvtepi32_ps(x); }
MOET_INLINE I add(I a, I b) { return _mm512_add_epi32(a, b); }
MOET_INLINE I sub(I a, I b) { return _mm512_sub_epi32(a, b); }
MOET_INLINE I both(I a, I b) { return _mm512_and_si512(a, b); }
template <int n> MOET_INLINE I shift_left(I x) { return _mm512_slli_epi32(x, n); }
template <int n> MOET_INLINE I shift_right(I x) { return _mm512_srli_epi32(x, n); }
template <int n> MOET_INLINE I shift_right_signed(I x) { return _mm512_srai_epi32(x, n); }
MOET_INLINE I max_unsigned(I a, I b) { return _mm512_max_epu32(a, b); }
MOET_INLINE uint32_t max_lane(I x) { return _mm512_reduce_max_epu32(x); }
MOET_INLINE I where_nan(F x, I nan, I other) {
  return _mm512_mask_mov_epi32(other, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
}

// --- weights and dots
MOET_INLINE I load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
MOET_INLINE I load_scales(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
MOET_INLINE I set_dword(const void* p) {
  int32_t x;
  __builtin_memcpy(&x, p, sizeof(x));
  return set_int(x);
}
MOET_INLINE I low_nibbles(I codes) { return _mm512_and_si512(codes, _mm512_set1_epi8(15)); }
MOET_INLINE I high_nibbles(I codes) { return low_nibbles(_mm512_srli_epi16(codes, 4)); }
MOET_INLINE I weights_of(I nibbles) {  // w2 + 12
  const __m128i t = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), nibbles);
}
MOET_INLINE Dot dot_start(const void* correction) { return {set_dword(correction)}; }
MOET_INLINE Dot dot_zero() { return {_mm512_setzero_si512()}; }
MOET_INLINE Dot dot(Dot sum, I weights, I q) {
  return {_mm512_dpbusd_epi32(sum.sums, weights, q)};  // wraps; dpbusds would saturate
}
MOET_INLINE I dot_finish(Dot sum) { return sum.sums; }
MOET_INLINE int32_t dot_negated(Dot sum) {
  return _mm_cvtsi128_si32(_mm512_castsi512_si128(sub(set_int(0), sum.sums)));
}

// --- packing. q: 32 int32 of one block in order. Bytes out: for each j, k = 8j, 8j+2, 8j+4, 8j+6,
// then 8j+1, 8j+3, 8j+5, 8j+7: the dwords that meet the low and the high nibbles of dword j.
MOET_INLINE void store_block(int8_t* out, const I (&q)[kBlock / kLanes]) {
  const __m256i bytes = _mm256_inserti128_si256(
      _mm256_castsi128_si256(_mm512_cvtepi32_epi8(q[0])), _mm512_cvtepi32_epi8(q[1]), 1);
  const __m256i even_odd = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_shuffle_epi8(bytes, even_odd));
}

// --- 16-bit floats (never VCVTNEPS2BF16: it flushes subnormals)
MOET_INLINE __m256i load_halves(const uint16_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
MOET_INLINE F load_bf16(const uint16_t* p) {
  return from_bits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(p)), 16));
}
MOET_INLINE F load_half(const uint16_t* p) { return _mm512_cvtph_ps(load_halves(p)); }
MOET_INLINE void store_low_halves(uint16_t* p, I x) {  // x in 0..65535
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
}
MOET_INLINE void store_half(uint16_t* p, F x) {  // NaN is 0x7FFF
  const __m256i h = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
  store_low_halves(p, where_nan(x, set_int(0x7FFF), _mm512_cvtepu16_epi32(h)));
}

// --- the strip's end: lane l holds row (l >> 1) + 8 * (l & 1)
MOET_INLINE void store_rows(float* out, const F (&lanes)[kTileRows / kLanes]) {
  const __m512i row = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  store(out, _mm512_permutexvar_ps(row, lanes[0]));
}

MOET_INLINE void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

}  // namespace
}  // namespace moet
