// The CPU kernels of one instruction set, as a table of functions. The algorithm is written once
// (kernels.inl); each vocabulary (portable, avx2, avx512vnni) instantiates it in its own
// translation unit with its own compiler flags. Bits: docs/numerics.md. Tiles: docs/format.md.
#pragma once
#include <cstddef>
#include <cstdint>

namespace moet {

enum class DType : uint8_t { kF32 = 0, kBF16 = 1, kF16 = 2 };
enum class Act : uint8_t { kMxInt8 = 8, kMxInt16 = 16 };
enum class Gate : uint8_t { kSilu = 0, kGptOss = 1, kGeluTanh = 2 };

// How gate and up become h. `limit` is +infinity where the model has none; alpha, the clamp and the
// (u + 1) of gpt-oss come with Gate::kGptOss.
struct GateSpec {
  Gate kind;
  float limit;
};

constexpr int kTileRows = 16;    // rows a strip
constexpr int kBlock = 32;       // weights a scale
constexpr int kGroupBlocks = 4;  // blocks a group: 1024 code bytes, then 64 scale bytes
constexpr int kGroupBytes = kGroupBlocks * (kTileRows * kBlock / 2 + kTileRows);
constexpr int kSegmentBlocks = 16;

// Bytes of one strip (16 rows x K) and of one quantised activation vector of K = 32 * blocks.
// (static: an ISA translation unit must not give the linker a weak symbol compiled with its flags.)
static inline constexpr size_t strip_bytes(int blocks) {
  return size_t((blocks + kGroupBlocks - 1) / kGroupBlocks) * kGroupBytes;
}
static inline constexpr size_t quantised_bytes(int blocks, Act act) {
  // q (8-bit slices, one or two a block), sx, the correction of each slice; a multiple of 64.
  const size_t slices = act == Act::kMxInt8 ? 1 : 2;
  const size_t raw = size_t(blocks) * (kBlock * slices + 4 + 4 * slices);
  return (raw + 63) / 64 * 64;
}

struct Kernels {
  const char* name;         // "portable", "avx2", "avx512vnni": reported by the code that ran
  const char* build_flags;  // the compiler flags of that table's own translation unit (MOET_FLAGS)

  // Quantises one vector. x: k elements of `type`; missing elements of the last block are +0.
  // out: quantised_bytes(ceil(k / 32), act) bytes, 64-byte aligned, private to the table inside.
  void (*quantise)(const void* x, DType type, int k, Act act, uint8_t* out);

  // tot of section 4 for one strip and m vectors. xs[m]: quantised vectors of 32 * blocks elements.
  // out: [m][16] fp32 in row order. Reads the strip from memory once.
  void (*strip)(const uint8_t* strip, int blocks, const uint8_t* const* xs, int m, Act act,
                float* out);

  // h[i] of section 5 for n elements, any n; bias addresses may be null.
  void (*gate)(GateSpec spec, const float* gate_tot, const float* up_tot, const float* gate_bias,
               const float* up_bias, int n, float* h);

  // Row of section 6: tot (+ bias) as fp32, or rounded to bf16 and widened again. In place.
  void (*finish_row)(float* row, const float* bias, int n, bool bf16_rows);

  // Combine of section 6 over slots in order: rows[s] may be null (skipped slot). out: n elements
  // of `type`; scale is applied before the final rounding (1.0f: none, and no multiplication happens).
  void (*combine)(const float* const* rows, const float* weights, int slots, int n, float scale,
                  bool has_scale, DType type, void* out);

  // For the exams: E and the gates' y on n inputs.
  void (*exp)(const float* x, int n, float* y);
};

// The tables that this build has; a table is usable only where cpu_supports(name) says so
// (csrc/core/cpuid.h). Null where the target architecture cannot have it. Each translation unit is
// compiled with -ffp-contract=off, its own -m flags and -DMOET_FLAGS="\"<all of its flags>\"":
//   portable.cpp    no -m flags
//   avx2.cpp        -mavx2 -mfma -mf16c
//   avx512vnni.cpp  -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512vnni_kernels();

}  // namespace moet
