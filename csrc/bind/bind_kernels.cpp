// Single kernels, for the exams. Each call runs in the contract's floating-point environment.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "../runtime/float_env.h"
#include "../runtime/isa.h"
#include "bind.h"

namespace nb = nanobind;

namespace moet {
namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;
using Name = const std::string&;

void quantise(Name isa, uint64_t x, int type, int k, int act, uint64_t out) {
  if (k < 1) throw Refusal("k = " + std::to_string(k), "at least one element");
  if (out % 64) throw Refusal("a quantised vector lies at a 64-byte boundary");
  const Kernels& kernels = find_kernels(isa);
  const FloatEnvironment environment;
  kernels.quantise(at<const void>(x), dtype_of(type), k, act_of(act), at<uint8_t>(out));
}

void strip(Name isa, uint64_t address, int blocks, const std::vector<uint64_t>& xs, int act,
           uint64_t out) {
  if (blocks < 1 || xs.empty()) throw Refusal("a strip needs blocks and vectors");
  std::vector<const uint8_t*> vectors;
  for (uint64_t x : xs) vectors.push_back(at<const uint8_t>(x));
  const Kernels& kernels = find_kernels(isa);
  const FloatEnvironment environment;
  kernels.strip(at<const uint8_t>(address), blocks, vectors.data(), int(vectors.size()), act_of(act),
                at<float>(out));
}

void gate(Name isa, int kind, std::optional<float> limit, uint64_t gate_tot, uint64_t up_tot,
          uint64_t gate_bias, uint64_t up_bias, int n, uint64_t h) {
  const float bound = limit.value_or(std::numeric_limits<float>::infinity());
  const Kernels& kernels = find_kernels(isa);
  const FloatEnvironment environment;
  kernels.gate(gate_of(kind, bound), at<const float>(gate_tot), at<const float>(up_tot),
               at<const float>(gate_bias), at<const float>(up_bias), n, at<float>(h));
}

void finish_row(Name isa, uint64_t row, uint64_t bias, int n, bool bf16_rows) {
  const Kernels& kernels = find_kernels(isa);
  const FloatEnvironment environment;
  kernels.finish_row(at<float>(row), at<const float>(bias), n, bf16_rows);
}

void combine(Name isa, const std::vector<uint64_t>& rows, uint64_t weights, int n,
             std::optional<float> scale, int type, uint64_t out) {
  std::vector<const float*> pointers;
  for (uint64_t row : rows) pointers.push_back(at<const float>(row));
  const Kernels& kernels = find_kernels(isa);
  const FloatEnvironment environment;
  kernels.combine(pointers.data(), at<const float>(weights), int(pointers.size()), n,
                  scale.value_or(1.0f), scale.has_value(), dtype_of(type), at<void>(out));
}

void exponential(Name isa, uint64_t x, int n, uint64_t y) {
  const Kernels& kernels = find_kernels(isa);
  const FloatEnvironment environment;
  kernels.exp(at<const float>(x), n, at<float>(y));
}

// C's fmaf on n triples: what the reference's emulation is compared with.
void fmaf_each(uint64_t a, uint64_t b, uint64_t c, int n, uint64_t out) {
  const FloatEnvironment environment;
  for (int i = 0; i < n; ++i)
    at<float>(out)[i] = std::fmaf(at<const float>(a)[i], at<const float>(b)[i], at<const float>(c)[i]);
}

// a * b + c as the compiler of this unit makes it: two roundings unless it contracts.
void multiply_add(uint64_t a, uint64_t b, uint64_t c, int n, uint64_t out) {
  const FloatEnvironment environment;
  for (int i = 0; i < n; ++i)
    at<float>(out)[i] = at<const float>(a)[i] * at<const float>(b)[i] + at<const float>(c)[i];
}

size_t vector_bytes(int blocks, int act) {
  if (blocks < 1) throw Refusal("a vector of " + std::to_string(blocks) + " blocks");
  return quantised_bytes(blocks, act_of(act));
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def("quantised_bytes", &vector_bytes, nb::arg("blocks"), nb::arg("act"));
  m.def("quantise", &quantise, nb::arg("isa"), nb::arg("x"), nb::arg("x_type"), nb::arg("k"),
        nb::arg("act"), nb::arg("out"), Unlocked());
  m.def("strip", &strip, nb::arg("isa"), nb::arg("strip"), nb::arg("blocks"), nb::arg("xs"),
        nb::arg("act"), nb::arg("out"), Unlocked());
  m.def("gate", &gate, nb::arg("isa"), nb::arg("kind"), nb::arg("limit").none(), nb::arg("gate_tot"),
        nb::arg("up_tot"), nb::arg("gate_bias"), nb::arg("up_bias"), nb::arg("n"), nb::arg("h"),
        Unlocked());
  m.def("finish_row", &finish_row, nb::arg("isa"), nb::arg("row"), nb::arg("bias"), nb::arg("n"),
        nb::arg("bf16_rows"), Unlocked());
  m.def("combine", &combine, nb::arg("isa"), nb::arg("rows"), nb::arg("weights"), nb::arg("n"),
        nb::arg("scale").none(), nb::arg("out_type"), nb::arg("out"), Unlocked());
  m.def("exp", &exponential, nb::arg("isa"), nb::arg("x"), nb::arg("n"), nb::arg("y"), Unlocked());
  m.def("fmaf", &fmaf_each, nb::arg("a"), nb::arg("b"), nb::arg("c"), nb::arg("n"), nb::arg("out"),
        Unlocked());
  m.def("multiply_add", &multiply_add, nb::arg("a"), nb::arg("b"), nb::arg("c"), nb::arg("n"),
        nb::arg("out"), Unlocked());
}

}  // namespace moet
