// The dot of a unit's four strips with a few columns, in form T without conversion
// (docs/numerics.md, section 3). Fragments of mma.m16n8k32: lane = 4 * g + t holds rows g and g +
// 8 of A, column g of B, and of the result rows g, g + 8 in columns 2t, 2t + 1.
//
// Decode has few columns, an MMA has eight. So strips share an accumulator: each strip's
// activations stand in columns of their own, the others being zero there, and the MMAs of the
// strips add up to the results of all, one strip after the other along the columns. Each result is
// needed: no lane scales or adds in vain.
#pragma once
#include "stream.cuh"

constexpr u32 kPlaces = 8;                    // columns of an MMA
constexpr u32 kSumStride = 16 * kStrips + 4;  // rows of a column, padded against conflicts

// How up to `columns` columns of activations lie in an accumulator. A *place* is a slice of a
// column.
template <class Act, int columns>
struct Form {
  static constexpr u32 slices = Act::slices;
  static constexpr u32 places = columns * slices < 2 ? 2 : columns * slices;
  static constexpr u32 shared = kPlaces / places;             // strips of an accumulator
  static constexpr u32 accumulators = kStrips / shared;
  static constexpr u32 each = slices == 1 && columns > 1 ? 2 : 1;  // columns of a lane's results
  // The column of a lane's first results, and its strip among those of an accumulator.
  MOET_DEVICE u32 column(u32 t) { return 2 * t % places / slices; }
  MOET_DEVICE u32 strip(u32 t) { return 2 * t / places; }
};

// A warp's activations in shared memory: a *chunk* is as many groups of `columns` rows as there is
// room for, [column][group].
template <class Act>
MOET_DEVICE constexpr u32 chunk_groups(u32 columns) {
  return columns < 2 ? kSegmentGroups : kPlaces / (columns * Act::slices);
}

constexpr u32 kChunkBytes = kPlaces * QuantisedRow<MxInt8>::group_bytes;

// All lanes: what they have fetched is there.
MOET_DEVICE void wait_for_chunk() {
  wait_for_pieces();
  __syncwarp();
}

// Where this lane reads in a chunk: the bytes of its place, from its own k on, and the constants
// of the columns that its results are in. Places past the last column read what was there before;
// their results are not stored.
template <class Act, int columns>
struct Reader {
  const u8* bytes;
  const u8* constants[Form<Act, columns>::each];
};

template <class Act, int columns>
MOET_DEVICE Reader<Act, columns> start_reader(const u8* chunk) {
  using F = Form<Act, columns>;
  using Row = QuantisedRow<Act>;
  const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const auto row = [&](u32 column) {
    return chunk + (column < columns ? column : 0) * chunk_groups<Act>(columns) * Row::group_bytes;
  };
  const u32 place = g % F::places;
  Reader<Act, columns> r;
  r.bytes = row(place / F::slices) + place % F::slices * Row::slice_bytes + 16 * t;
  for (u32 i = 0; i < F::each; ++i) r.constants[i] = row(F::column(t) + i) + Row::constants_at;
  return r;
}

// B operands of two neighbouring blocks: of each strip that shares an accumulator, zero where the
// lane's column is another strip's. Those zeros stay; only a lane's own strip is loaded anew.
template <class F>
struct Operands {
  uint4 of[F::shared];
};

template <class F>
MOET_DEVICE void load_operands(Operands<F>& x, const u8* bytes) {
  const u32 strip = (threadIdx.x & 31) / 4 / F::places;
#pragma unroll
  for (u32 s = 0; s < F::shared; ++s) load_if(x.of[s], strip == s, bytes);
}

// {sx, c, ...} of both blocks.
template <class F>
struct Constants {
  uint4 of[F::each][F::slices];
};

template <class F, class Act, int columns>
MOET_DEVICE Constants<F> load_constants(const Reader<Act, columns>& r, u32 at) {
  Constants<F> c;
  for (u32 i = 0; i < F::each; ++i)
    for (u32 s = 0; s < F::slices; ++s)
      c.of[i][s] = *reinterpret_cast<const uint4*>(r.constants[i] + at + 16 * s);
  return c;
}

// Codes as signed bytes, in two tiles whose sum is w2: each look-up gives the bytes of one sign,
// and of the other sign the top bit of the looked-up byte eight times. So codes above zero are (w2
// + 1) + (-1), codes below zero 0 + w2, and zeros 0 + 0: six operations for eight weights, and the
// integer MMA adds.
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

MOET_DEVICE Weights load_weights(const u8* tile) {
  const uint2 codes = *reinterpret_cast<const uint2*>(tile);
  Weights w;
  decode(codes.x, w.above, w.below, 0);
  decode(codes.y, w.above, w.below, 1);
  return w;
}

// d * scale, exactly: d is the bits of kMagic + the integer, `constant` takes kMagic away.
MOET_DEVICE float product(int d, u32 scale, u32 constant) {
  return __fmaf_rn(__int_as_float(d), __uint_as_float(scale), __uint_as_float(constant));
}

// t = d * sx of column i of one of a lane's rows.
template <class F>
MOET_DEVICE float scaled(MxInt8, const Constants<F>& c, u32 i, bool second, const int* d) {
  const uint4 k = c.of[i][0];
  return product(d[i], second ? k.z : k.x, second ? k.w : k.y);
}

// The high slice's constant takes the low one's along: it leaves (256 * d_hi - M) * sx, and the
// low slice's M * sx makes up for it; both are exact.
template <class F>
MOET_DEVICE float scaled(MxInt16, const Constants<F>& c, u32, bool second, const int* d) {
  const uint4 k = second ? c.of[0][1] : c.of[0][0];
  return __fmaf_rn(__int_as_float(d[1]), __uint_as_float(k.x), product(d[0], k.y, k.z));
}

// Sums so far: of each accumulator, rows g and g + 8.
template <class F>
struct Sums {
  float of[F::accumulators][2][F::each];
};

// Two blocks of all strips, or the first of them. `tiles` and `scales` are this lane's.
template <class F, class Act>
MOET_DEVICE void add_blocks(const u8* tiles, const u8* scales, const Operands<F>& x,
                            const Constants<F>& c, bool both, Sums<F>& sums) {
#pragma unroll
  for (u32 e = 0; e < F::accumulators; ++e) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      int d[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
#pragma unroll
      for (u32 s = 0; s < F::shared; ++s) {
        const Weights w = load_weights(tiles + (e * F::shared + s) * kGroupBytes + i * kTileBytes);
        const uint4 b = x.of[s];
        mma(d, w.above, i ? b.z : b.x, i ? b.w : b.y);
        mma(d, w.below, i ? b.z : b.x, i ? b.w : b.y);
      }
      for (u32 row = 0; row < 2; ++row) {
        const u32 scale = scales[e * F::shared * kGroupBytes + i * 16 + row];
        const float sw = __uint_as_float(scale << 23);
        for (u32 j = 0; j < F::each; ++j) {
          float& sum = sums.of[e][row][j];
          const float more = __fmaf_rn(scaled<F>(Act{}, c, j, i == 1, d + 2 * row), sw, sum);
          // Padding blocks of a last group are never added: 0 added to -0 is a change.
          if (i == 0 || both) sum = more;
        }
      }
    }
  }
}

template <class F>
MOET_DEVICE void store_sums(const Sums<F>& sums, u32 count, float* to) {
  const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (u32 e = 0; e < F::accumulators; ++e)
    for (u32 j = 0; j < F::each; ++j) {
      const u32 column = F::column(t) + j, strip = e * F::shared + F::strip(t);
      if (column >= count) continue;
      for (u32 row = 0; row < 2; ++row)
        to[column * kSumStride + strip * 16 + 8 * row + g] = sums.of[e][row][j];
    }
}

// An item with what belongs to it.
struct Work {
  Item item;
  const u32* columns;  // row of `in` << 16 | routing
  u32 count;           // of columns; 0: there is no item
};

MOET_DEVICE Work work_of(const Stage& s, const Item& item) {
  if (item.entry == kNoEntry) return {item, nullptr, 0};
  const u32 packed = s.routing.entries[item.entry].columns;
  const u32 done = item.pass * s.most_columns, left = (packed & 0xFFFF) - done;
  return {item, s.routing.columns + (packed >> 16) + done,
          left < s.most_columns ? left : s.most_columns};
}

// The columns that the dot makes room for.
template <class Act>
MOET_DEVICE u32 form_of(u32 count) {
  if (Act::slices == 2) return count == 1 ? 1 : 4;
  return count <= 2 ? count : count <= 4 ? 4 : 8;
}

// All lanes: starts fetching a chunk of an item, from `group` on.
template <class Act>
MOET_DEVICE void fetch(const Stage& s, const Work& w, u32 group, u8* chunk) {
  using Row = QuantisedRow<Act>;
  const u32 room = chunk_groups<Act>(form_of<Act>(w.count));
  const u32 left = item_groups(s, w.item.segment) - group;
  const u32 bytes = (left < room ? left : room) * Row::group_bytes;
  const u8* in = s.p.in + (w.item.segment * kSegmentGroups + group) * Row::group_bytes;
  __syncwarp();
#pragma unroll 1
  for (u32 j = 0; j < w.count; ++j, chunk += room * Row::group_bytes) {
    const u8* row = in + (w.columns[j] >> 16) * Row::bytes(s.groups);
#pragma unroll 1
    for (u32 at = 16 * (threadIdx.x & 31); at < bytes; at += 512) copy_piece(chunk + at, row + at);
  }
}

// One segment of a unit; the weights come through the ring, the activations chunk by chunk, the
// first one being on its way. `before_last` is called before the last group, when the ring knows
// what is next.
template <class Act, int columns, class BeforeLast>
MOET_DEVICE void dot_item(const Stage& s, const Work& w, Ring& ring, u8* chunk,
                          Sums<Form<Act, columns>>& sums, const BeforeLast& before_last) {
  using F = Form<Act, columns>;
  using Row = QuantisedRow<Act>;
  const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const auto reader = start_reader<Act, columns>(chunk);
  u32 blocks = s.p.blocks - w.item.segment * kSegmentBlocks;
  blocks = blocks < kSegmentBlocks ? blocks : kSegmentBlocks;
  const u32 groups = item_groups(s, w.item.segment);
  // Wider forms need the registers.
  [[maybe_unused]] constexpr int kUnroll = F::places == 2 ? 2 : 1;
  sums = {};
  Operands<F> x = {};
#pragma unroll 1
  for (u32 group = 0; group < groups; ++group) {
    const u32 place = group % chunk_groups<Act>(columns);
    if (place == 0) {
      if (group > 0) fetch<Act>(s, w, group, chunk);
      wait_for_chunk();
    }
    if (group + 1 == groups) before_last();
    const u8* slot = wait_for_slot(ring);
    const u8* tiles = slot + t * 64 + g * 8;
    const u8* scales = slot + F::strip(t) * kGroupBytes + kScalesAt + 2 * g;
#pragma unroll kUnroll
    for (u32 pair = 0; pair < 2; ++pair) {
      if (4 * group + 2 * pair >= blocks) break;
      load_operands(x, reader.bytes + place * Row::group_bytes + pair * Row::pair_bytes);
      const auto constants =
          load_constants<F>(reader, place * Row::group_bytes + pair * 2 * Row::block_constants);
      add_blocks<F, Act>(tiles + pair * 2 * kTileBytes, scales + pair * 32, x, constants,
                         4 * group + 2 * pair + 1 < blocks, sums);
    }
    release_slot(s, ring);
  }
}

// tot of section 4: the segments' sums of one element, added in order.
MOET_DEVICE float total(const Stage& s, const float* first, u32 stride) {
  float tot = first[0];
  for (u32 j = 1; j < s.segments; ++j) tot = __fadd_rn(tot, first[j * stride]);
  return tot;
}
