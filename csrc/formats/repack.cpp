#include "repack.h"

#include <cstring>

#include "../cpu/kernels.h"

namespace moet {
namespace {

constexpr int kRowBlockBytes = kBlock / 2;              // codes of one row, one block
constexpr int kTileBytes = kTileRows * kRowBlockBytes;  // codes of one tile
constexpr uint8_t kReservedScale = 255;
constexpr uint8_t kZeros[kRowBlockBytes] = {};

// One row of a strip, block by block. A missing row stays on a block of zeros (step 0).
struct Row {
  const uint8_t* codes;
  const uint8_t* scales;
  size_t step;  // 1 or 0
  const uint8_t* codes_of(int block) const { return codes + step * block * kRowBlockBytes; }
  uint8_t scale_of(int block) const { return scales[step * block]; }
};

Row row_at(const MatrixRows& m, int row) {
  if (row >= m.rows) return {kZeros, kZeros, 0};
  return {m.codes + row * m.code_stride, m.scales + row * m.scale_stride, 1};
}

// Rows i and i + 8 lie side by side in lanes 2i and 2i + 1: their dwords j make one 8-byte store.
void move_pair(const uint8_t* low, const uint8_t* high, uint8_t* tile) {
  constexpr int line = 4 * kTileRows;
  for (int j = 0; j < 4; j += 2) {
    uint64_t a, b;
    std::memcpy(&a, low + 4 * j, 8);
    std::memcpy(&b, high + 4 * j, 8);
    const uint64_t first = (a & 0xFFFFFFFF) | b << 32, second = a >> 32 | (b >> 32 << 32);
    std::memcpy(tile + line * j, &first, 8);
    std::memcpy(tile + line * (j + 1), &second, 8);
  }
}

void move_block(const Row (&rows)[kTileRows], int block, uint8_t* tile, uint8_t* scales) {
  for (int i = 0; i < 8; ++i) {
    move_pair(rows[i].codes_of(block), rows[i + 8].codes_of(block), tile + 8 * i);
    scales[2 * i] = rows[i].scale_of(block);
    scales[2 * i + 1] = rows[i + 8].scale_of(block);
  }
}

void move_strip(const Row (&rows)[kTileRows], int blocks, uint8_t* strip) {
  if (blocks % kGroupBlocks) std::memset(strip + strip_bytes(blocks) - kGroupBytes, 0, kGroupBytes);
  for (int b = 0; b < blocks; ++b) {
    uint8_t* group = strip + size_t(b / kGroupBlocks) * kGroupBytes;
    const int i = b % kGroupBlocks;
    move_block(rows, b, group + i * kTileBytes, group + kGroupBlocks * kTileBytes + i * kTileRows);
  }
}

int64_t first_reserved(const MatrixRows& m, int rows) {
  for (int row = 0; row < rows; ++row) {
    const uint8_t* scales = m.scales + row * m.scale_stride;
    const void* found = std::memchr(scales, kReservedScale, size_t(m.blocks));
    if (found) return int64_t(row) * m.blocks + (static_cast<const uint8_t*>(found) - scales);
  }
  return -1;
}

}  // namespace

int64_t repack_matrix(const MatrixRows& m, uint8_t* out, size_t strip_stride, int strips) {
  const int rows_here = strips * kTileRows < m.rows ? strips * kTileRows : m.rows;
  const int64_t reserved = first_reserved(m, rows_here);
  if (reserved >= 0) return reserved;
  for (int s = 0; s < strips; ++s) {
    Row rows[kTileRows];
    for (int r = 0; r < kTileRows; ++r) rows[r] = row_at(m, s * kTileRows + r);
    move_strip(rows, m.blocks, out + s * strip_stride);
  }
  return -1;
}

}  // namespace moet
