// Where things lie: the tiles of docs/format.md, quantised rows, and what a kernel is launched with.
// The Params structs are mirrored field by field in params.py.
#pragma once
#include "contract.cuh"

constexpr u32 kTileBytes = 256;                          // one block of 16 rows
constexpr u32 kScalesAt = kGroupBlocks * kTileBytes;     // in a group: behind its four tiles
constexpr u32 kGroupBytes = kScalesAt + kGroupBlocks * 16;
constexpr u32 kSlotGroups = 1;                           // groups of a strip in a ring slot
constexpr u32 kSlotBytes = 2 * kSlotGroups * kGroupBytes;  // one strip's, then the other's
constexpr u32 kColumns = 8;                              // tokens of one MMA

// Entries of the expert table that are no addresses.
constexpr u64 kElsewhere = 0;  // not computed here; somebody else writes its row
constexpr u64 kForeign = 1;    // another rank's: its slots are skipped

// A quantised row holds its bytes, then the constants of its blocks, in groups of four blocks.
// MXINT8:  a group's bytes are [pair of blocks][k / 8][block of the pair][k % 8], so that lane t of
//          a fragment reads 16 bytes for two blocks; a block's constants are {sx, c}.
// MXINT16: [block][k / 8][high, low][k % 8]; constants {sx, c of low, 256 * sx, c of high}.
template <class Act>
struct QuantisedRow {
  static constexpr u32 group_bytes = 128 * Act::slices;
  static constexpr u32 block_constants = 8 * Act::slices;
  static constexpr u32 group_constants = kGroupBlocks * block_constants;

  MOET_DEVICE u32 bytes(u32 groups) { return groups * (group_bytes + group_constants); }
  MOET_DEVICE u32 constants(u32 groups, u32 block) {
    return groups * group_bytes + block * block_constants;
  }
  MOET_DEVICE void store_constants(u8* row, u32 groups, u32 block, float sx) {
    u8* at = row + constants(groups, block);
    if (Act::slices == 1)
      *reinterpret_cast<float2*>(at) = {sx, __fmul_rn(-kMagic, sx)};
    else
      *reinterpret_cast<float4*>(at) = {sx, __fmul_rn(256.0f, sx), __fmul_rn(-257.0f * kMagic, sx),
                                        0.0f};
  }
  // Of element k of a block; the low slice of MXINT16 lies 8 bytes on.
  MOET_DEVICE u32 element(u32 block, u32 k) {
    const u32 piece = (k >> 3) * 16 + (k & 7);
    if (Act::slices == 2) return block * 64 + piece;
    return (block >> 1) * 64 + (block & 1) * 8 + piece;
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

// One matrix stage (gate and up, or down) over all experts. A pair is two neighbouring strips of the
// record: gate and up of the same 16 rows, or 32 rows of down.
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
  u32 unit_pairs;    // pairs that a block of threads finishes together
  u32 out_size;      // of an output row: groups (gate and up), or H (down)
  u32 bias;          // offset of the first bias in the record, 0: none
  u32 second_bias;   // offset of the up bias
  u32 gate;          // Gate
  float limit;       // infinity: none
  u32 depth;         // slots of a warp's ring
  u32 sum_buffers;   // 1 or 2
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
