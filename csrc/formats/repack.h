// From a checkpoint's MXFP4 rows to strips (docs/format.md). A repack moves dwords and scale bytes;
// it never looks inside a nibble.
#pragma once
#include <cstddef>
#include <cstdint>

namespace moet {

// Rows of a checkpoint tensor as they lie in memory. A selection is an address and a stride: every
// second row of an interleaved gate/up tensor (stride of two rows), a slice of K for tensor
// parallelism (address of its first block). Row r has its codes at codes + r * code_stride (16
// bytes a block, low nibble = even k), its scales at scales + r * scale_stride (a byte a block).
struct MatrixRows {
  const uint8_t* codes;
  size_t code_stride;
  const uint8_t* scales;
  size_t scale_stride;
  int rows;
  int blocks;  // K / 32
};

// Writes `strips` strips of 16 rows, strip s at out + s * strip_stride (two strips where gate and
// up alternate). Rows past m.rows and the padding of the last group are zero bytes. Strips are
// independent: a caller may split a matrix over threads by strips.
// Returns -1, or row * blocks + block of the first reserved scale byte (255) in those strips' rows;
// nothing is written then.
int64_t repack_matrix(const MatrixRows& m, uint8_t* out, size_t strip_stride, int strips);

}  // namespace moet
