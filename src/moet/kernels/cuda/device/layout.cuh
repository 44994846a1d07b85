// Where things lie: the tiles of docs/format.md, quantised rows, and what a kernel is launched
// with. The Params structs are mirrored field by field in params.py.
#pragma once
#include "contract.cuh"

constexpr u32 kTileBytes = 256;                          // one block of 16 rows
constexpr u32 kScalesAt = kGroupBlocks * kTileBytes;     // in a group: behind its four tiles
constexpr u32 kGroupBytes = kScalesAt + kGroupBlocks * 16;
constexpr u32 kStrips = 4;                               // of a unit
constexpr u32 kSlotBytes = kStrips * kGroupBytes;        // a ring slot: one group of each strip

// Entries of the expert table that are no addresses.
constexpr u64 kElsewhere = 0;  // not computed here; somebody else writes its row
constexpr u64 kForeign = 1;    // another rank's: its slots are skipped

// A quantised row, in groups of four blocks: the bytes of a group, then its blocks' constants.
// Bytes are [pair of blocks][high, low slice][k / 8][block of the pair][k % 8], MXINT8 having one
// slice: lane t of a fragment reads 16 bytes for two blocks. Constants of MXINT8 are {sx, c}, of
// MXINT16 {sx, 256 * sx, c of both slices, 0}.
template <class Act>
struct QuantisedRow {
  static constexpr u32 block_constants = 8 * Act::slices;
  static constexpr u32 constants_at = 128 * Act::slices;  // in a group
  static constexpr u32 group_bytes = constants_at + kGroupBlocks * block_constants;
  static constexpr u32 pair_bytes = 64 * Act::slices;
  static constexpr u32 slice_bytes = 64;

  MOET_DEVICE u32 bytes(u32 groups) { return groups * group_bytes; }
  MOET_DEVICE void store_constants(u8* row, u32 block, float sx) {
    u8* at = row + block / kGroupBlocks * group_bytes + constants_at +
             block % kGroupBlocks * block_constants;
    if (Act::slices == 1)
      *reinterpret_cast<float2*>(at) = {sx, __fmul_rn(-kMagic, sx)};
    else
      *reinterpret_cast<float4*>(at) = {sx, __fmul_rn(256.0f, sx), __fmul_rn(-257.0f * kMagic, sx),
                                        0.0f};
  }
  // Of element k of a block in the row, in the first slice; the other lies slice_bytes on.
  MOET_DEVICE u32 element(u32 block, u32 k) {
    return block / kGroupBlocks * group_bytes + block % kGroupBlocks / 2 * pair_bytes +
           (k >> 3) * 16 + (block & 1) * 8 + (k & 7);
  }
};

struct QuantiseParams {
  const void* x;  // [T][H] of x_type
  u8* rows;       // [T] quantised rows
  u32 x_type;
  u32 tokens;  // T
  u32 hidden;  // H
  u32 groups;  // of four blocks, the last one padded with zeros
  u32 act;     // 8 or 16
};

// One matrix stage (gate and up, or down) over all experts. A pair is two neighbouring strips of
// the record: gate and up of the same 16 rows, or 32 rows of down; a unit is two pairs.
struct StageParams {
  const u64* table;  // [E] addresses of records, or kElsewhere, kForeign
  const int* ids;    // [T][K]
  const u8* in;      // quantised rows: of tokens (gate and up) or of routings (down)
  void* out;         // quantised rows of routings, or fp32 [T * K][H]
  u32 routings;      // T * K
  u32 experts;       // E
  u32 in_divisor;    // routing / in_divisor is the row of `in`: K, or 1
  u32 blocks;        // of K
  u32 section;       // offset of the first strip in the record
  u32 pairs;         // of an expert
  u32 out_size;      // of an output row: groups (gate and up), or H (down)
  u32 bias;          // offset of the first bias in the record, 0: none
  u32 second_bias;   // offset of the up bias
  u32 gate;          // Gate
  float limit;       // infinity: none
  u32 depth;         // slots of a warp's ring
  u32 sum_columns;   // columns of one segment's sums that a block has room for
};

struct CombineParams {
  const u64* table;
  const int* ids;        // [T][K]
  const float* weights;  // [T][K]
  const float* rows;     // [T * K][H]
  void* out;             // [T][H] of out_type
  u32* status;           // counts slots that nobody can compute
  u32 tokens;
  u32 top_k;
  u32 experts;
  u32 hidden;
  u32 out_type;
  u32 has_scale;
  float scale;
  u32 elsewhere;  // where rows of kElsewhere experts are: see Elsewhere
  const u8* host_rows;  // [T * K][H] bf16 (MXINT8) or fp32, mapped host memory
  const u32* failed;    // not 0: the host's rows will not come
  u32 host_bf16;
};

enum Elsewhere : u32 {
  kNowhere = 0,   // such a slot is an error
  kInRows = 1,    // in `rows`
  kOnHost = 2,    // in `host_rows`
};
