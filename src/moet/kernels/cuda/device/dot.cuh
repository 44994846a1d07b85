// The dot of a pair of strips with up to 8 columns, in form T without conversion (docs/numerics.md,
// section 3). Fragments of mma.m16n8k32: lane = 4 * g + t holds rows g and g + 8 of A, column g of
// B, and of the result rows g, g + 8 in columns 2t, 2t + 1.
#pragma once
#include "stream.cuh"

constexpr u32 kSumStride = 20;                         // rows of a column, padded against conflicts
constexpr u32 kStripSums = kColumns * kSumStride;
constexpr u32 kItemSums = 2 * kStripSums;              // floats of one item: a pair, one segment

// What this lane reads of its columns, as offsets into `in`: the bytes of one column (from the lane's
// own k on), and the constants of two. A pass of up to four columns is *narrow*: column j is column
// 2j of the MMA, so that only the even half of the results, and one column's constants, matter to a
// lane. Where there are fewer columns than places, the first one is read again, and the results are
// not stored.
struct Columns {
  u32 bytes;
  u32 constants[2];
  u32 count;
};

constexpr u32 kNarrow = kColumns / 2;

template <class Act>
MOET_DEVICE Columns find_columns(const Stage& s, const Task& task) {
  const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const u32 packed = s.routing.entries[task.entry].columns;
  const u32 count = (packed & 0xFFFF) - task.pass * kColumns;
  const u32* columns = s.routing.columns + (packed >> 16) + task.pass * kColumns;
  const auto row = [&](u32 column) {
    return (columns[column < count ? column : 0] >> 16) * QuantisedRow<Act>::bytes(s.groups);
  };
  const u32 constants = QuantisedRow<Act>::constants(s.groups, 0);
  if (count <= kNarrow) return {row(g >> 1) + 16 * t, {row(t) + constants, 0}, count};
  return {row(g) + 16 * t, {row(2 * t) + constants, row(2 * t + 1) + constants}, count};
}

// Addresses of the group in work.
template <bool wide>
struct Reader {
  const u8* bytes;
  const u8* constants[wide ? 2 : 1];

  template <class Act>
  MOET_DEVICE Reader start(const Stage& s, const Columns& c, u32 group) {
    Reader r;
    r.bytes = s.p.in + c.bytes + group * QuantisedRow<Act>::group_bytes;
    for (int i = 0; i < (wide ? 2 : 1); ++i)
      r.constants[i] = s.p.in + c.constants[i] + group * QuantisedRow<Act>::group_constants;
    return r;
  }
};

template <class Act, bool wide>
MOET_DEVICE void next_group(Reader<wide>& r) {
  r.bytes += QuantisedRow<Act>::group_bytes;
  for (auto& constants : r.constants) constants += QuantisedRow<Act>::group_constants;
}

// What one 16-byte load of each kind gives this lane: two neighbouring blocks in MXINT8, one in
// MXINT16.
template <bool wide>
struct Activations {
  uint4 bytes;
  uint4 constants[wide ? 2 : 1];  // [column]
};

MOET_DEVICE uint4 load(const u8* p) { return *reinterpret_cast<const uint4*>(p); }

template <class Act, bool wide>
MOET_DEVICE Activations<wide> load_activations(const Reader<wide>& r, u32 block) {
  Activations<wide> a;
  a.bytes = load(r.bytes + block * Act::slices / 2 * 64);
  for (int i = 0; i < (wide ? 2 : 1); ++i)
    a.constants[i] = load(r.constants[i] + block * QuantisedRow<Act>::block_constants);
  return a;
}

// Codes as signed bytes, in two tiles whose sum is w2: each look-up gives the bytes of one sign, and
// of the other sign the top bit of the looked-up byte eight times. So codes above zero are
// (w2 + 1) + (-1), codes below zero 0 + w2, and zeros 0 + 0: six operations for eight weights, and
// the integer MMA adds.
struct Weights {
  u32 above[4], below[4];
};

MOET_DEVICE void decode(u32 codes, u32 (&above)[4], u32 (&below)[4], int row) {
  const u32 flipped = codes ^ 0x88888888;
  above[row] = permute(0x04030200, 0x0D090705, codes);
  above[row + 2] = permute(0x04030200, 0x0D090705, codes >> 16);
  below[row] = permute(0xFDFEFF00, 0xF4F8FAFC, flipped);
  below[row + 2] = permute(0xFDFEFF00, 0xF4F8FAFC, flipped >> 16);
}

// The bits of kMagic + d for this lane's four results.
MOET_DEVICE void dot(const Weights& w, u32 b0, u32 b1, int (&d)[4]) {
  for (int& x : d) x = kMagicBits;
  mma(d, w.above, b0, b1);
  mma(d, w.below, b0, b1);
}

// d * scale, exactly.
MOET_DEVICE float product(int d, u32 scale, u32 constant) {
  return __fmaf_rn(__int_as_float(d), __uint_as_float(scale), __uint_as_float(constant));
}

// t = d * sx of a tile of MXINT8; the activations' first or second block. Result i is in row
// g + 8 * (i / 2), column 2t + i % 2; narrow passes have even i only.
template <bool wide>
MOET_DEVICE void tile_products(MxInt8, const Weights& w, const Activations<wide>& x, bool second,
                               float (&t)[4]) {
  int d[4];
  dot(w, second ? x.bytes.z : x.bytes.x, second ? x.bytes.w : x.bytes.y, d);
  for (int i = 0; i < 4; i += wide ? 1 : 2) {
    const uint4 c = x.constants[i & 1];
    t[i] = product(d[i], second ? c.z : c.x, second ? c.w : c.y);
  }
}

// The same of MXINT16. The high slice's constant takes the low one's along: it leaves
// (256 * d_hi - M) * sx, and the low slice's M * sx makes up for it; both are exact.
template <bool wide>
MOET_DEVICE void tile_products(MxInt16, const Weights& w, const Activations<wide>& x, bool,
                               float (&t)[4]) {
  int high[4], low[4];
  dot(w, x.bytes.x, x.bytes.y, high);
  dot(w, x.bytes.z, x.bytes.w, low);
  for (int i = 0; i < 4; i += wide ? 1 : 2) {
    const uint4 c = x.constants[i & 1];
    t[i] = __fmaf_rn(__int_as_float(low[i]), __uint_as_float(c.x), product(high[i], c.y, c.z));
  }
}

// One block of one strip: acc = fma(t, sw, acc).
template <class Act, bool wide>
MOET_DEVICE void add_block(const u8* group, u32 block, const Activations<wide>& x, bool second,
                           float (&acc)[4]) {
  const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const uint2 codes =
      *reinterpret_cast<const uint2*>(group + block * kTileBytes + t * 64 + g * 8);
  const u8* scales = group + kScalesAt + block * 16 + 2 * g;
  const float sw[2] = {__uint_as_float(static_cast<u32>(scales[0]) << 23),
                       __uint_as_float(static_cast<u32>(scales[1]) << 23)};
  Weights w;
  decode(codes.x, w.above, w.below, 0);
  decode(codes.y, w.above, w.below, 1);
  float products[4];
  tile_products(Act{}, w, x, second, products);
  for (int i = 0; i < 4; i += wide ? 1 : 2) acc[i] = __fmaf_rn(products[i], sw[i >> 1], acc[i]);
}

// `count` blocks of the group from `block` on, in both strips; one load of activations serves them.
template <class Act, bool wide, int count>
MOET_DEVICE void add_blocks(const Reader<wide>& r, const u8* group, u32 block,
                            float (&acc)[2][4]) {
  const auto x = load_activations<Act>(r, block);
#pragma unroll
  for (int i = 0; i < count; ++i) {
    add_block<Act>(group, block + i, x, i == 1, acc[0]);
    add_block<Act>(group + kSlotGroups * kGroupBytes, block + i, x, i == 1, acc[1]);
  }
}

// The first `blocks` blocks of a group, usually all. Padding blocks of a last group are loaded but
// never added: 0 added to -0 is a change.
template <class Act, bool wide>
MOET_DEVICE void add_group(const Reader<wide>& r, const u8* group, u32 blocks,
                           float (&acc)[2][4]) {
  constexpr int span = 2 / Act::slices;
  if (blocks >= kGroupBlocks) {
#pragma unroll 1
    for (u32 b = 0; b < kGroupBlocks; b += span) add_blocks<Act, wide, span>(r, group, b, acc);
    return;
  }
  u32 b = 0;
#pragma unroll 1
  for (; b + span <= blocks; b += span) add_blocks<Act, wide, span>(r, group, b, acc);
  if (b < blocks) add_blocks<Act, wide, 1>(r, group, b, acc);
}

// The sums of one item: one segment of a pair of strips.
template <class Act, bool wide>
MOET_DEVICE void dot_item_of(const Stage& s, const Columns& columns, Ring& ring, u32 segment,
                             float* sums) {
  auto reader =
      Reader<wide>::template start<Act>(s, columns, segment * (kSegmentBlocks / kGroupBlocks));
  u32 blocks = s.p.blocks - segment * kSegmentBlocks;
  blocks = blocks < kSegmentBlocks ? blocks : kSegmentBlocks;
  float acc[2][4] = {};
  for (u32 left = item_groups(s, segment); left > 0;) {
    const u8* group = wait_for_slot(ring);
    const u32 groups = slot_groups(left);
    left -= groups;
#pragma unroll 1
    for (u32 i = 0; i < groups; ++i) {
      add_group<Act>(reader, group, blocks, acc);
      next_group<Act>(reader);
      group += kGroupBytes;
      blocks -= kGroupBlocks;
    }
    release_slot(s, ring);
  }
  const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int i = 0; i < 8; i += wide ? 1 : 2) {
    const u32 strip = i >> 2, column = wide ? 2 * t + (i & 1) : t, row = g + 8 * (i >> 1 & 1);
    if (column < columns.count)
      sums[strip * kStripSums + column * kSumStride + row] = acc[strip][i & 3];
  }
}

template <class Act>
MOET_DEVICE void dot_item(const Stage& s, const Columns& columns, Ring& ring, u32 segment,
                          float* sums) {
  if (columns.count <= kNarrow) dot_item_of<Act, false>(s, columns, ring, segment, sums);
  else dot_item_of<Act, true>(s, columns, ring, segment, sums);
}

// tot of section 4: the segments' sums of one element, added in order.
MOET_DEVICE float total(const Stage& s, const float* first) {
  float tot = first[0];
  for (u32 j = 1; j < s.segments; ++j) tot = __fadd_rn(tot, first[j * kItemSums]);
  return tot;
}
