#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <limits>
#include <memory>
#include <optional>

#include "../formats/repack.h"
#include "../runtime/layer.h"
#include "bind.h"

namespace nb = nanobind;

namespace moet {
namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

void make_layer(Layer* self, std::shared_ptr<Pool> pool, const std::string& isa, int hidden,
                int intermediate, int experts, int top_k, int act, int gate,
                std::optional<float> limit, bool biased, bool rows_bf16, int max_tokens) {
  const float bound = limit.value_or(std::numeric_limits<float>::infinity());
  new (self) Layer(std::move(pool), isa,
                   {hidden, intermediate, experts, top_k, act_of(act), gate_of(gate, bound), biased,
                    rows_bf16, max_tokens});
}

void run(Layer& layer, uint64_t x, int x_type, int tokens, uint64_t weights, uint64_t ids, int slots,
         uint64_t out, int out_type, std::optional<float> scale, bool ids_64) {
  layer.run({at<const uint8_t>(x), dtype_of(x_type), tokens, at<const float>(weights),
             at<const uint8_t>(ids), ids_64 ? IdType::kI64 : IdType::kI32, slots, at<uint8_t>(out),
             dtype_of(out_type), scale.value_or(1.0f), scale.has_value()});
}

void run_rows(Layer& layer, uint64_t x, int x_type, int tokens, uint64_t ids, int slots,
              uint64_t rows) {
  layer.run({at<const uint8_t>(x), dtype_of(x_type), tokens, nullptr, at<const uint8_t>(ids),
             IdType::kI32, slots, nullptr, DType::kF32, 1.0f, false, at<uint8_t>(rows)});
}

void combine_rows(Layer& layer, uint64_t rows, int tokens, uint64_t weights, uint64_t ids, int slots,
                  uint64_t out, int out_type, std::optional<float> scale) {
  layer.combine_rows({nullptr, DType::kF32, tokens, at<const float>(weights), at<const uint8_t>(ids),
                      IdType::kI32, slots, at<uint8_t>(out), dtype_of(out_type), scale.value_or(1.0f),
                      scale.has_value(), at<uint8_t>(rows)});
}

std::optional<std::string> ran_isa(const Layer& layer) {
  const char* name = layer.ran_isa();
  return name ? std::optional<std::string>(name) : std::nullopt;
}

int64_t repack(uint64_t codes, size_t code_stride, uint64_t scales, size_t scale_stride, int rows,
               int blocks, uint64_t out, size_t strip_stride, int strips) {
  if (rows < 0 || blocks < 1 || strips < 0)
    throw Refusal("a matrix of " + std::to_string(rows) + " rows and " + std::to_string(blocks) +
                  " blocks in " + std::to_string(strips) + " strips");
  return repack_matrix({at<const uint8_t>(codes), code_stride, at<const uint8_t>(scales), scale_stride,
                        rows, blocks},
                       at<uint8_t>(out), strip_stride, strips);
}

}  // namespace

void bind_layer(nb::module_& m) {
  nb::class_<Layer>(m, "Layer", "The routed experts of one MoE layer: plan, bind, run.")
      .def("__init__", &make_layer, nb::arg("pool"), nb::arg("isa"), nb::arg("hidden"),
           nb::arg("intermediate"), nb::arg("experts"), nb::arg("top_k"), nb::arg("act"),
           nb::arg("gate"), nb::arg("limit").none(), nb::arg("biased"), nb::arg("rows_bf16"),
           nb::arg("max_tokens"), Unlocked())
      .def("bind", &Layer::bind, nb::arg("expert"), nb::arg("address"))
      .def("unbind", &Layer::unbind, nb::arg("expert"))
      .def("mark_foreign", &Layer::mark_foreign, nb::arg("expert"))
      .def("run", &run, nb::arg("x"), nb::arg("x_type"), nb::arg("tokens"), nb::arg("weights"),
           nb::arg("ids"), nb::arg("slots"), nb::arg("out"), nb::arg("out_type"),
           nb::arg("scale").none() = nb::none(), nb::arg("ids_64") = false, Unlocked())
      .def("run_rows", &run_rows, nb::arg("x"), nb::arg("x_type"), nb::arg("tokens"), nb::arg("ids"),
           nb::arg("slots"), nb::arg("rows"), "The rows [tokens * slots][H], not combined.", Unlocked())
      .def("combine_rows", &combine_rows, nb::arg("rows"), nb::arg("tokens"), nb::arg("weights"),
           nb::arg("ids"), nb::arg("slots"), nb::arg("out"), nb::arg("out_type"),
           nb::arg("scale").none() = nb::none(), "What `run` makes of such rows.", Unlocked())
      .def_prop_ro("ran_isa", &ran_isa)
      .def_prop_ro("record_bytes", &Layer::record_bytes)
      .def_prop_ro("workspace_bytes", &Layer::workspace_bytes);
  m.def("repack_matrix", &repack, nb::arg("codes"), nb::arg("code_stride"), nb::arg("scales"),
        nb::arg("scale_stride"), nb::arg("rows"), nb::arg("blocks"), nb::arg("out"),
        nb::arg("strip_stride"), nb::arg("strips"),
        "Rows to strips; -1, or the index (row * blocks + block) of the first reserved scale.",
        Unlocked());
}

}  // namespace moet
