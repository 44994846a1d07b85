// The kernels, once, in the words of a vocabulary (portable.h, avx2.h, avx512vnni.h), which must be
// included before. Everything is internal to the translation unit: no standard library templates,
// so that the linker cannot pick a weak copy compiled for another processor.
//
// The order of every fp32 operation below is load-bearing (docs/numerics.md). Bounds:
//   d = sum of w2 * q over 32: |d| <= 32 * 12 * 127 = 48,768 with 8 bits; 32 * 12 * 32,639 =
//   12,533,376 < 2^24 with 16 bits (d = 256 * d_hi + d_lo): float(d) is exact in both.
namespace moet {
namespace {

constexpr int kParts = kTileRows / kLanes;  // vectors a tile is wide
constexpr int kBlockVectors = kBlock / kLanes;
constexpr int kDwords = kBlock / 8;  // dwords of codes a row; a slice of q has twice as many
constexpr int kTileBytes = kTileRows * kBlock / 2;
constexpr int kPrefetchBytes = 2 * kGroupBytes;  // how far ahead of the tile in work; measured
constexpr uint32_t kNan = 0x7FFFFFFF;

// The sums of a tile are arrays that must live in registers: every loop over them is unrolled.
#define MOET_UNROLL _Pragma("GCC unroll 64")

// Section 1: a block's element is q * 2^(be - unit), its scale sx = 2^(be - unit - 1).
struct Format {
  int slices;      // signed bytes an element
  uint32_t carry;  // be = (largest magnitude's bits + carry) >> 23
  uint32_t unit;
  uint32_t floor;  // sx = 2^-126
};
constexpr Format format_of(Act act) {
  return act == Act::kMxInt8 ? Format{1, 0x1FFFF, 133, 8} : Format{2, 0x101FF, 141, 16};
}
constexpr uint32_t kCeiling = 238;

// Where the parts of a quantised vector lie: [block][slice][32] bytes, [block] sx, [block][slice]
// corrections.
template <Act act>
struct Layout {
  static constexpr int slices = format_of(act).slices;
  int blocks;
  constexpr int q(int block) const { return block * slices * kBlock; }
  constexpr int sx(int block) const { return q(blocks) + 4 * block; }
  constexpr int correction(int block) const { return sx(blocks) + 4 * slices * block; }
};

MOET_INLINE float float_at(const uint8_t* p) {
  float x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}

MOET_INLINE float float_of_bits(uint32_t x) {
  float f;
  __builtin_memcpy(&f, &x, sizeof(f));
  return f;
}

// --- quantise

template <DType type>
MOET_INLINE F load_as(const void* x, int i) {
  if constexpr (type == DType::kF32) return load(static_cast<const float*>(x) + i);
  if constexpr (type == DType::kBF16) return load_bf16(static_cast<const uint16_t*>(x) + i);
  if constexpr (type == DType::kF16) return load_half(static_cast<const uint16_t*>(x) + i);
}

MOET_INLINE uint32_t block_exponent(const F (&x)[kBlockVectors], Format format) {
  I largest = set_int(0);
  for (int i = 0; i < kBlockVectors; ++i)
    largest = max_unsigned(largest, both(bits(x[i]), set_int(0x7FFFFFFF)));
  const uint32_t be = (max_lane(largest) + format.carry) >> 23;
  return be < format.floor ? format.floor : be;
}

// Stores one slice and its correction: minus the dot with 12 everywhere.
MOET_INLINE void store_slice(const I (&q)[kBlockVectors], uint8_t* bytes, uint8_t* correction) {
  alignas(32) int8_t packed[kBlock];
  store_block(packed, q);
  Dot sum = dot_zero();
  const I twelves = set_int(0x0C0C0C0C);
  for (int i = 0; i < 2 * kDwords; ++i) sum = dot(sum, twelves, set_dword(packed + 4 * i));
  const int32_t negated = dot_negated(sum);
  __builtin_memcpy(bytes, packed, kBlock);
  __builtin_memcpy(correction, &negated, sizeof(negated));
}

template <Act act>
MOET_INLINE void quantise_block(const F (&x)[kBlockVectors], Layout<act> at, int block,
                                uint8_t* out) {
  constexpr Format format = format_of(act);
  const uint32_t be = block_exponent(x, format);
  const bool poisoned = be > kCeiling;
  const F inv = set(float_of_bits(poisoned ? 0 : (format.unit + 127 - be) << 23));
  // Adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the low bits.
  const F magic = set(12582912.0f);
  I q[kBlockVectors];
  for (int i = 0; i < kBlockVectors; ++i) {
    q[i] = sub(bits(add(mul(x[i], inv), magic)), bits(magic));
    if (poisoned) q[i] = set_int(0);
  }
  if constexpr (act == Act::kMxInt16) {
    I high[kBlockVectors];
    for (int i = 0; i < kBlockVectors; ++i) {
      high[i] = shift_right_signed<8>(add(q[i], set_int(128)));
      q[i] = sub(q[i], shift_left<8>(high[i]));
    }
    store_slice(high, out + at.q(block), out + at.correction(block));
  }
  constexpr int last = at.slices - 1;
  store_slice(q, out + at.q(block) + last * kBlock, out + at.correction(block) + last * 4);
  const uint32_t sx = poisoned ? kNan : (be - format.unit - 1 + 127) << 23;
  __builtin_memcpy(out + at.sx(block), &sx, sizeof(sx));
}

template <DType type, Act act>
void quantise_vector(const void* x, int k, uint8_t* out) {
  constexpr int size = type == DType::kF32 ? 4 : 2;
  const Layout<act> at{(k + kBlock - 1) / kBlock};
  for (int b = 0; b < at.blocks; ++b) {
    const char* block = static_cast<const char*>(x) + size * kBlock * b;
    alignas(64) char padded[kBlock * size] = {};
    if (k - b * kBlock < kBlock) {
      __builtin_memcpy(padded, block, size * (k - b * kBlock));
      block = padded;
    }
    F v[kBlockVectors];
    for (int i = 0; i < kBlockVectors; ++i) v[i] = load_as<type>(block, i * kLanes);
    quantise_block<act>(v, at, b, out);
  }
}

template <Act act>
void quantise_type(const void* x, DType type, int k, uint8_t* out) {
  switch (type) {
    case DType::kF32: return quantise_vector<DType::kF32, act>(x, k, out);
    case DType::kBF16: return quantise_vector<DType::kBF16, act>(x, k, out);
    case DType::kF16: return quantise_vector<DType::kF16, act>(x, k, out);
  }
}

void quantise(const void* x, DType type, int k, Act act, uint8_t* out) {
  if (act == Act::kMxInt8) return quantise_type<Act::kMxInt8>(x, type, k, out);
  return quantise_type<Act::kMxInt16>(x, type, k, out);
}

// --- strip

MOET_INLINE void prefetch_tile(const uint8_t* codes) {
  for (int i = 0; i < kTileBytes; i += 64) prefetch(codes + kPrefetchBytes + i);
}

// The running dots of m vectors with the rows of one tile.
template <Act act, int m>
struct Dots {
  static constexpr int slices = format_of(act).slices;
  Dot of[m][slices][kParts];
};

// One dword of codes a row: weights decoded once, met by two dwords of every slice.
template <Act act, int m>
MOET_INLINE void dot_dword(const uint8_t* codes, const uint8_t* const* xs, int q,
                           Dots<act, m>& dots) {
  I low[kParts], high[kParts];
  MOET_UNROLL for (int p = 0; p < kParts; ++p) {
    const I v = load_codes(codes + 4 * kLanes * p);
    low[p] = weights_of(low_nibbles(v));
    high[p] = weights_of(high_nibbles(v));
  }
  MOET_UNROLL for (int t = 0; t < m; ++t) {
    MOET_UNROLL for (int s = 0; s < dots.slices; ++s) {
      const uint8_t* at = xs[t] + q + kBlock * s;
      const I even = set_dword(at), odd = set_dword(at + 4);
      MOET_UNROLL for (int p = 0; p < kParts; ++p) {
        dots.of[t][s][p] = dot(dots.of[t][s][p], low[p], even);
        dots.of[t][s][p] = dot(dots.of[t][s][p], high[p], odd);
      }
    }
  }
}

template <Act act, int m>
MOET_INLINE Dots<act, m> dot_tile(const uint8_t* codes, const uint8_t* const* xs, Layout<act> at,
                                  int block) {
  Dots<act, m> dots;
  MOET_UNROLL for (int t = 0; t < m; ++t)
    MOET_UNROLL for (int s = 0; s < dots.slices; ++s)
      MOET_UNROLL for (int p = 0; p < kParts; ++p)
        dots.of[t][s][p] = dot_start(xs[t] + at.correction(block) + 4 * s);
  MOET_UNROLL for (int j = 0; j < kDwords; ++j)
    dot_dword<act, m>(codes + 4 * kTileRows * j, xs, at.q(block) + 8 * j, dots);
  return dots;
}

template <int slices>
MOET_INLINE F value_of(const Dot (&of)[slices][kParts], int part) {
  const I first = dot_finish(of[0][part]);
  if constexpr (slices == 1) return to_float(first);
  else return to_float(add(shift_left<8>(first), dot_finish(of[slices - 1][part])));
}

// acc = fma(d * sx, sw, acc) for one block and m vectors.
template <Act act, int m>
MOET_INLINE void add_block(const uint8_t* codes, const uint8_t* scales, const uint8_t* const* xs,
                           Layout<act> at, int block, F (&acc)[m][kParts]) {
  prefetch_tile(codes);
  const Dots<act, m> dots = dot_tile<act, m>(codes, xs, at, block);
  F sw[kParts];
  MOET_UNROLL for (int p = 0; p < kParts; ++p)
    sw[p] = from_bits(shift_left<23>(load_scales(scales + kLanes * p)));
  MOET_UNROLL for (int t = 0; t < m; ++t) {
    const F sx = set(float_at(xs[t] + at.sx(block)));
    MOET_UNROLL for (int p = 0; p < kParts; ++p)
      acc[t][p] = fma(mul(value_of(dots.of[t], p), sx), sw[p], acc[t][p]);
  }
}

template <Act act, int m>
MOET_INLINE void add_group(const uint8_t* group, const uint8_t* const* xs, Layout<act> at,
                           int block, F (&acc)[m][kParts]) {
  const uint8_t* scales = group + kGroupBlocks * kTileBytes;
  prefetch(scales + kPrefetchBytes);
  const int n = at.blocks - block < kGroupBlocks ? at.blocks - block : kGroupBlocks;
  for (int i = 0; i < n; ++i)
    add_block<act, m>(group + i * kTileBytes, scales + i * kTileRows, xs, at, block + i, acc);
}

template <Act act, int m>
void strip_of(const uint8_t* strip, int blocks, const uint8_t* const* xs, float* out) {
  const Layout<act> at{blocks};
  F tot[m][kParts] = {};
  for (int first = 0; first < blocks; first += kSegmentBlocks) {
    F acc[m][kParts];
    for (int t = 0; t < m; ++t)
      for (int p = 0; p < kParts; ++p) acc[t][p] = set(0.0f);
    for (int b = first; b < blocks && b < first + kSegmentBlocks; b += kGroupBlocks)
      add_group<act, m>(strip + size_t(b / kGroupBlocks) * kGroupBytes, xs, at, b, acc);
    for (int t = 0; t < m; ++t)
      for (int p = 0; p < kParts; ++p)
        tot[t][p] = first == 0 ? acc[t][p] : add(tot[t][p], acc[t][p]);
  }
  for (int t = 0; t < m; ++t) store_rows(out + t * kTileRows, tot[t]);
}

// The last m <= most vectors: one instantiation a count, so that each keeps its sums in registers.
template <Act act, int most>
void strip_rest(const uint8_t* strip, int blocks, const uint8_t* const* xs, int m, float* out) {
  if constexpr (most > 0) {
    if (m == most) return strip_of<act, most>(strip, blocks, xs, out);
    strip_rest<act, most - 1>(strip, blocks, xs, m, out);
  }
}

template <Act act>
void strip_act(const uint8_t* strip, int blocks, const uint8_t* const* xs, int m, float* out) {
  constexpr int most = kTokens / (kSlicesShareTokens ? format_of(act).slices : 1);
  for (; m > most; m -= most, xs += most, out += most * kTileRows)
    strip_of<act, most>(strip, blocks, xs, out);
  strip_rest<act, most>(strip, blocks, xs, m, out);
}

void strip(const uint8_t* strip, int blocks, const uint8_t* const* xs, int m, Act act, float* out) {
  if (act == Act::kMxInt8) return strip_act<Act::kMxInt8>(strip, blocks, xs, m, out);
  strip_act<Act::kMxInt16>(strip, blocks, xs, m, out);
}

// --- exp and the gates (section 5)

// Elements lo..lo + kLanes - 1 of an array of n, through a zero-filled copy where n ends inside.
struct Window {
  int lo, n;
  bool whole() const { return n - lo >= kLanes; }
  int count() const { return whole() ? kLanes : n - lo; }
};

MOET_INLINE F read(const float* p, Window w) {
  if (w.whole()) return load(p + w.lo);
  float padded[kLanes] = {};
  __builtin_memcpy(padded, p + w.lo, sizeof(float) * w.count());
  return load(padded);
}

MOET_INLINE void write(float* p, Window w, F v) {
  if (w.whole()) return store(p + w.lo, v);
  float padded[kLanes];
  store(padded, v);
  __builtin_memcpy(p + w.lo, padded, sizeof(float) * w.count());
}

// E(x): x = n ln 2 + r, a polynomial for exp(r), 2^n by integer addition to the exponent.
MOET_INLINE F exponential(F x) {
  x = floor_at(cap(x, set(87.0f)), set(-87.0f));
  const F magic = set(12582912.0f);
  const F z = fma(x, set(0x1.715476p+0f), magic);
  const F n = sub(z, magic);
  F r = fma(n, set(-0x1.62e43p-1f), x);
  r = fma(n, set(0x1.05c61p-29f), r);
  F p = set(0x1.6a515cp-10f);
  p = fma(p, r, set(0x1.12397ep-7f));
  p = fma(p, r, set(0x1.5558acp-5f));
  p = fma(p, r, set(0x1.555492p-3f));
  p = fma(p, r, set(0x1.fffffcp-2f));
  p = fma(p, r, set(1.0f));
  p = fma(p, r, set(1.0f));
  return from_bits(add(bits(p), shift_left<23>(bits(z))));
}

// a / RN(1 + E(-z))
MOET_INLINE F over_one_plus_exp(F a, F z) {
  const F minus_z = from_bits(sub(bits(z), set_int(INT32_MIN)));  // flips the sign bit
  return div(a, add(set(1.0f), exponential(minus_z)));
}

template <Gate kind>
MOET_INLINE F gated(F g, F u) {
  if constexpr (kind == Gate::kSilu) {
    const F a = floor_at(g, set(-87.0f));
    return mul(over_one_plus_exp(a, a), u);
  }
  if constexpr (kind == Gate::kGptOss) {
    const F a = floor_at(g, set(-51.0f));
    const F y = over_one_plus_exp(a, mul(set(0x1.b3b646p+0f), a));
    return mul(add(u, set(1.0f)), y);
  }
  if constexpr (kind == Gate::kGeluTanh) {
    const F a = floor_at(g, set(-9.0f));
    const F c = fma(mul(a, a), set(0x1.2444f2p-4f), set(0x1.988454p+0f));
    return mul(over_one_plus_exp(a, mul(c, a)), u);
  }
}

MOET_INLINE F biased(const float* tot, const float* bias, Window w) {
  return bias ? add(read(tot, w), read(bias, w)) : read(tot, w);
}

template <Gate kind>
void gate_kind(float limit, const float* gate_tot, const float* up_tot, const float* gate_bias,
               const float* up_bias, int n, float* h) {
  const F high = set(limit), low = set(-limit);
  for (Window w{0, n}; w.lo < n; w.lo += kLanes) {
    const F g = cap(biased(gate_tot, gate_bias, w), high);
    const F u = floor_at(cap(biased(up_tot, up_bias, w), high), low);
    write(h, w, gated<kind>(g, u));
  }
}

void gate(GateSpec spec, const float* gate_tot, const float* up_tot, const float* gate_bias,
          const float* up_bias, int n, float* h) {
  const auto run = spec.kind == Gate::kSilu     ? gate_kind<Gate::kSilu>
                   : spec.kind == Gate::kGptOss ? gate_kind<Gate::kGptOss>
                                                : gate_kind<Gate::kGeluTanh>;
  run(spec.limit, gate_tot, up_tot, gate_bias, up_bias, n, h);
}

void exp_all(const float* x, int n, float* y) {
  for (Window w{0, n}; w.lo < n; w.lo += kLanes) write(y, w, exponential(read(x, w)));
}

// --- rows and combine (section 6)

// The bf16 nearest to x, ties to even, in the low half; NaN is 0x7FFF.
MOET_INLINE I round_to_bf16(F x) {
  const I odd = both(shift_right<16>(bits(x)), set_int(1));
  const I rounded = shift_right<16>(add(add(bits(x), set_int(0x7FFF)), odd));
  return where_nan(x, set_int(0x7FFF), rounded);
}

void finish_row(float* row, const float* bias, int n, bool bf16_rows) {
  if (!bias && !bf16_rows) return;
  for (Window w{0, n}; w.lo < n; w.lo += kLanes) {
    F v = biased(row, bias, w);
    if (bf16_rows) v = from_bits(shift_left<16>(round_to_bf16(v)));
    write(row, w, v);
  }
}

template <DType type>
MOET_INLINE void write_as(void* out, Window w, F v) {
  if constexpr (type == DType::kF32) {
    const F canonical = from_bits(where_nan(v, set_int(kNan), bits(v)));
    return write(static_cast<float*>(out), w, canonical);
  } else {
    uint16_t* p = static_cast<uint16_t*>(out) + w.lo;
    uint16_t padded[kLanes];
    uint16_t* to = w.whole() ? p : padded;
    if constexpr (type == DType::kBF16) store_low_halves(to, round_to_bf16(v));
    if constexpr (type == DType::kF16) store_half(to, v);
    if (!w.whole()) __builtin_memcpy(p, padded, sizeof(uint16_t) * w.count());
  }
}

template <DType type>
void combine_as(const float* const* rows, const float* weights, int slots, int n, float scale,
                bool has_scale, void* out) {
  for (Window w{0, n}; w.lo < n; w.lo += kLanes) {
    F sum = set(0.0f);
    for (int s = 0; s < slots; ++s)
      if (rows[s]) sum = fma(set(weights[s]), read(rows[s], w), sum);
    if (has_scale) sum = mul(set(scale), sum);
    write_as<type>(out, w, sum);
  }
}

void combine(const float* const* rows, const float* weights, int slots, int n, float scale,
             bool has_scale, DType type, void* out) {
  const auto run = type == DType::kF32    ? combine_as<DType::kF32>
                   : type == DType::kBF16 ? combine_as<DType::kBF16>
                                          : combine_as<DType::kF16>;
  run(rows, weights, slots, n, scale, has_scale, out);
}

#ifndef MOET_FLAGS
#error "MOET_FLAGS: pass this translation unit's compiler flags as a string"
#endif
constexpr Kernels kKernels = {kName, MOET_FLAGS,  quantise, strip,
                              gate,  finish_row, combine,  exp_all};

}  // namespace
}  // namespace moet
