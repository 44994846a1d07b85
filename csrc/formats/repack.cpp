#include "repack.h"

#include <cstring>

#include "../cpu/kernels.h"

namespace moet {
namespace {

constexpr int kRowBlockBytes = kBlock / 2;                        // codes of one row, one block
constexpr int kTileBytes = kTileRows * kRowBlockBytes;            // codes of one tile
constexpr uint8_t kReservedScale = 255;

// Lanes 2i and 2i + 1 hold rows i and i + 8.
constexpr int lane_of_row(int row) { return 2 * (row & 7) + (row >> 3); }

struct BlockSlot {
  uint8_t* codes;
  uint8_t* scales;
};

BlockSlot slot_of_block(uint8_t* strip, int block) {
  uint8_t* group = strip + size_t(block / kGroupBlocks) * kGroupBytes;
  const int i = block % kGroupBlocks;
  return {group + i * kTileBytes, group + kGroupBlocks * kTileBytes + i * kTileRows};
}

// One row of one strip. Returns the first block with a reserved scale, or -1.
int repack_row(const uint8_t* codes, const uint8_t* scales, int blocks, int lane, uint8_t* strip) {
  int reserved = -1;
  for (int b = 0; b < blocks; ++b) {
    const BlockSlot slot = slot_of_block(strip, b);
    for (int j = 0; j < 4; ++j)
      std::memcpy(slot.codes + 4 * (kTileRows * j + lane), codes + kRowBlockBytes * b + 4 * j, 4);
    slot.scales[lane] = scales[b];
    if (scales[b] == kReservedScale && reserved < 0) reserved = b;
  }
  return reserved;
}

}  // namespace

int64_t repack_matrix(const MatrixRows& m, uint8_t* out, size_t strip_stride, int strips) {
  int64_t reserved = -1;
  for (int s = 0; s < strips; ++s) {
    uint8_t* strip = out + s * strip_stride;
    const int first = s * kTileRows;
    if (m.rows - first < kTileRows || m.blocks % kGroupBlocks != 0)
      std::memset(strip, 0, strip_bytes(m.blocks));
    for (int r = first; r < first + kTileRows && r < m.rows; ++r) {
      const int b = repack_row(m.codes + r * m.code_stride, m.scales + r * m.scale_stride, m.blocks,
                               lane_of_row(r - first), strip);
      if (b >= 0 && reserved < 0) reserved = int64_t(r) * m.blocks + b;
    }
  }
  return reserved;
}

}  // namespace moet
