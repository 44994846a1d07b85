// What a MoE layer is to the runtime, and one call of it. Letters: T tokens, S slots a token,
// E experts, H hidden, I intermediate.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../cpu/kernels.h"

namespace moet {

struct LayerShape {
  int hidden;        // H, a multiple of 32
  int intermediate;  // I, a multiple of 32
  int experts;       // E
  int top_k;         // most slots of a token
  Act act;
  GateSpec gate;
  bool biased;
  bool rows_bf16;
  int max_tokens;  // tokens of one step; longer calls are cut into steps
};

enum class IdType : uint8_t { kI32 = 0, kI64 = 1 };

struct Call {
  const uint8_t* x;  // [T][H] of x_type
  DType x_type;
  int tokens;            // T
  const float* weights;  // [T][S]
  const uint8_t* ids;    // [T][S] of id_type; negative: an empty slot
  IdType id_type;
  int slots;     // S, at most top_k
  uint8_t* out;  // [T][H] of out_type
  DType out_type;
  float scale;  // factor on the output, used where has_scale
  bool has_scale;
  // Not null: the step ends with the rows, [T * S][H] in the layer's row type (bf16 or fp32), for
  // somebody else to combine; out, weights and scale are not used. Rows of skipped slots stay as they
  // are.
  uint8_t* rows = nullptr;

  int64_t id(size_t routing) const {
    return id_type == IdType::kI32 ? reinterpret_cast<const int32_t*>(ids)[routing]
                                   : reinterpret_cast<const int64_t*>(ids)[routing];
  }
};

static inline size_t dtype_bytes(DType type) { return type == DType::kF32 ? 4 : 2; }

}  // namespace moet
