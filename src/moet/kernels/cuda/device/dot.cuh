// The dot of a pair of strips with up to 8 columns, in form T without conversion (docs/numerics.md,
// section 3). Fragments of mma.m16n8k32: lane = 4 * g + t holds rows g and g + 8 of A, column g of
// B, and of the result rows g, g + 8 in columns 2t, 2t + 1.
#pragma once
#include "stream.cuh"

constexpr u32 kSumStride = 20;                         // rows of a column, padded against conflicts
constexpr u32 kStripSums = kColumns * kSumStride;
constexpr u32 kItemSums = 2 * kStripSums;              // floats of one item: a pair, one segment

// Where this lane's columns lie, as offsets into `in`: column g for the bytes, columns 2t and 2t + 1
// for the constants. A column that is not there counts as zeros and is never stored.
constexpr u32 kNoColumn = 0xFFFFFFFF;
struct Columns {
  u32 bytes;
  u32 constants[2];
};

template <class Act>
MOET_DEVICE Columns find_columns(const Stage& s, const Task& task) {
  const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const u32 packed = s.routing.entries[task.entry].columns;
  const u32 left = (packed & 0xFFFF) - task.pass * kColumns;
  const u16* first = s.routing.columns + (packed >> 16) + task.pass * kColumns;
  const auto row = [&](u32 column) -> u32 {
    if (column >= left) return kNoColumn;
    return first[column] / s.p.in_divisor * QuantisedRow<Act>::bytes(s.groups);
  };
  return {row(g), {row(2 * t), row(2 * t + 1)}};
}

MOET_DEVICE uint4 load_or_zero(const Stage& s, u32 row, u32 at) {
  if (row == kNoColumn) return uint4{0, 0, 0, 0};
  return *reinterpret_cast<const uint4*>(s.p.in + (row + at));
}

// What one 16-byte load of each kind gives this lane: two neighbouring blocks in MXINT8, one in
// MXINT16.
struct Activations {
  uint4 bytes;
  uint4 constants[2];  // [column]
};

template <class Act>
MOET_DEVICE Activations load_activations(const Stage& s, const Columns& c, u32 block) {
  const u32 t = threadIdx.x & 3;
  const u32 bytes = block * Act::slices / 2 * 64 + t * 16;
  const u32 constants = QuantisedRow<Act>::constants(s.groups, block);
  return {load_or_zero(s, c.bytes, bytes),
          {load_or_zero(s, c.constants[0], constants), load_or_zero(s, c.constants[1], constants)}};
}

// Eight codes as bytes w2 + 12: a table for either sign, each giving 0 for the other one.
MOET_DEVICE void decode(u32 codes, u32& low, u32& high) {
  const u32 flipped = codes ^ 0x88888888;
  low = permute(0x0F0E0D0C, 0x18141210, codes) | permute(0x090A0B0C, 0x00040608, flipped);
  high = permute(0x0F0E0D0C, 0x18141210, codes >> 16) |
         permute(0x090A0B0C, 0x00040608, flipped >> 16);
}

// d * sx of one block for one of this lane's eight results, exactly.
MOET_DEVICE float product(int d, u32 scale, u32 constant) {
  return __fmaf_rn(__int_as_float(d), __uint_as_float(scale), __uint_as_float(constant));
}

// t = d * sx of a tile of MXINT8; the activations' first or second block.
MOET_DEVICE void tile_products(MxInt8, const u32 (&a)[4], const Activations& x, bool second,
                               float (&t)[4]) {
  int d[4];
  mma(d, a, second ? x.bytes.z : x.bytes.x, second ? x.bytes.w : x.bytes.y, kMagicBits);
  for (int i = 0; i < 4; ++i) {
    const uint4 c = x.constants[i & 1];
    t[i] = product(d[i], second ? c.z : c.x, second ? c.w : c.y);
  }
}

// The same of MXINT16: the slices' products are added, which is exact, since 256 * d_hi + d_lo has
// 24 bits.
MOET_DEVICE void tile_products(MxInt16, const u32 (&a)[4], const Activations& x, bool,
                               float (&t)[4]) {
  int high[4], low[4];
  mma(high, a, x.bytes.x, x.bytes.y, kMagicBits);
  mma(low, a, x.bytes.z, x.bytes.w, kMagicBits);
  for (int i = 0; i < 4; ++i) {
    const uint4 c = x.constants[i & 1];
    t[i] = __fadd_rn(product(high[i], c.z, c.w), product(low[i], c.x, c.y));
  }
}

// One block of one strip: acc = fma(t, sw, acc) in four places.
template <class Act>
MOET_DEVICE void add_block(const u8* group, u32 block, const Activations& x, bool second,
                           float (&acc)[4]) {
  const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const uint2 codes =
      *reinterpret_cast<const uint2*>(group + block * kTileBytes + t * 64 + g * 8);
  const u32 scales = *reinterpret_cast<const u16*>(group + kScalesAt + block * 16 + 2 * g);
  const float sw[2] = {__uint_as_float((scales & 0xFF) << 23), __uint_as_float(scales >> 8 << 23)};
  u32 a[4];
  decode(codes.x, a[0], a[2]);
  decode(codes.y, a[1], a[3]);
  float products[4];
  tile_products(Act{}, a, x, second, products);
  for (int i = 0; i < 4; ++i) acc[i] = __fmaf_rn(products[i], sw[i >> 1], acc[i]);
}

// `count` blocks of the group from `block` on, in both strips; one load of activations serves them.
template <class Act, int count>
MOET_DEVICE void add_blocks(const Stage& s, const Columns& c, const u8* slot, u32 group, u32 block,
                            float (&acc)[2][4]) {
  const Activations x = load_activations<Act>(s, c, group * kGroupBlocks + block);
#pragma unroll
  for (int i = 0; i < count; ++i) {
    add_block<Act>(slot, block + i, x, i == 1, acc[0]);
    add_block<Act>(slot + kGroupBytes, block + i, x, i == 1, acc[1]);
  }
}

// Padding blocks of a last group are loaded but never added: 0 added to -0 is a change.
template <class Act>
MOET_DEVICE void add_group(const Stage& s, const Columns& c, const u8* slot, u32 group,
                           float (&acc)[2][4]) {
  constexpr int span = 2 / Act::slices;
  const u32 blocks = s.p.blocks - group * kGroupBlocks;
  if (blocks >= kGroupBlocks) {
#pragma unroll
    for (u32 b = 0; b < kGroupBlocks; b += span) add_blocks<Act, span>(s, c, slot, group, b, acc);
    return;
  }
  u32 b = 0;
  for (; b + span <= blocks; b += span) add_blocks<Act, span>(s, c, slot, group, b, acc);
  if (b < blocks) add_blocks<Act, 1>(s, c, slot, group, b, acc);
}

// The sums of one item: one segment of a pair of strips.
template <class Act>
MOET_DEVICE void dot_item(const Stage& s, const Columns& c, Ring& ring, u32 segment, float* sums) {
  const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float acc[2][4] = {};
  const u32 groups = item_groups(s, segment);
  for (u32 i = 0; i < groups; ++i) {
    const u8* slot = wait_for_group(ring);
    add_group<Act>(s, c, slot, segment * (kSegmentBlocks / kGroupBlocks) + i, acc);
    release_group(s, ring);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 strip = i >> 2, column = 2 * t + (i & 1), row = g + 8 * (i >> 1 & 1);
    if (c.constants[i & 1] != kNoColumn)
      sums[strip * kStripSums + column * kSumStride + row] = acc[strip][i & 3];
  }
}

// tot of section 4: the segments' sums of one element, added in order.
MOET_DEVICE float total(const Stage& s, const float* first) {
  float tot = first[0];
  for (u32 j = 1; j < s.segments; ++j) tot = __fadd_rn(tot, first[j * kItemSums]);
  return tot;
}
