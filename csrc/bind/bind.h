// The parts of moet._core. Buffers cross the door as plain addresses: whoever passes one keeps it
// alive and vouches for its size. Everything else is checked here or below.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "../core/refusal.h"
#include "../cpu/kernels.h"

namespace moet {

void bind_pool(nanobind::module_& m);
void bind_layer(nanobind::module_& m);
void bind_kernels(nanobind::module_& m);
void bind_io(nanobind::module_& m);
void bind_machine(nanobind::module_& m);
void bind_mailbox(nanobind::module_& m);

template <class T>
T* at(uint64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

static inline DType dtype_of(int value) {
  if (value < 0 || value > 2) throw Refusal("no data type " + std::to_string(value), "0 f32, 1 bf16, 2 f16");
  return DType(value);
}

static inline Act act_of(int value) {
  if (value != 8 && value != 16)
    throw Refusal("no activation format of " + std::to_string(value) + " bits", "8 (MXINT8) or 16 (MXINT16)");
  return Act(value);
}

static inline GateSpec gate_of(int kind, float limit) {
  if (kind < 0 || kind > 2)
    throw Refusal("no gate " + std::to_string(kind), "0 silu, 1 gpt-oss, 2 gelu_tanh");
  return {Gate(kind), limit};
}

}  // namespace moet
