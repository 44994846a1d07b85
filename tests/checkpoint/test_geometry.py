"""config.json to geometry, for every architecture that is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moet.checkpoint.experts import name_pattern
from moet.checkpoint.families import ARCHITECTURES, LAYOUTS, ExpertFormat
from moet.checkpoint.faults import BrokenCheckpoint, Fault
from moet.checkpoint.geometry import ModelGeometry, read_geometry
from moet.checkpoint.synth.presets import PACKED_MXFP4, PRESETS
from moet.formats.gate import GateKind
from moet.formats.mxint import ActFormat

FILE = Path("config.json")


def read(config: dict[str, Any]) -> ModelGeometry:
    return read_geometry(config, FILE)


# hidden, layers, MoE layers, experts, top-k, intermediate, activations: the models' own tables.
PUBLISHED = {
    "deepseek-v4.1-flash": (5120, 40, 40, 384, 6, 2304, 8),
    "deepseek-v4-flash": (4096, 43, 43, 256, 6, 2048, 8),
    "glm-5.2": (6144, 78, 75, 256, 8, 2048, 16),
    "kimi-k2.7": (7168, 61, 60, 384, 8, 2048, 16),
    "gpt-oss-20b": (2880, 24, 24, 32, 4, 2880, 16),
    "gpt-oss-120b": (2880, 36, 36, 128, 4, 2880, 16),
    "glm-4.5-air": (4096, 46, 45, 128, 8, 1408, 16),
    "olmoe-1b-7b": (2048, 16, 16, 64, 8, 1024, 16),
    "qwen3-30b-a3b": (2048, 48, 48, 128, 8, 768, 16),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_sizes(name: str) -> None:
    g = read(PRESETS[name])
    sizes = (g.hidden, g.layers, len(g.moe_layers), g.experts, g.top_k, g.intermediate, int(g.act))
    assert sizes == PUBLISHED[name]
    assert g.expert_format is ExpertFormat.MXFP4
    assert isinstance(g.gate, GateKind)


def test_gates_and_limits() -> None:
    deepseek, oss = read(PRESETS["deepseek-v4-flash"]), read(PRESETS["gpt-oss-20b"])
    assert (deepseek.gate, deepseek.limit, deepseek.biased) == (GateKind.SILU, 10.0, False)
    assert (oss.gate, oss.limit, oss.biased) == (GateKind.GPT_OSS, 7.0, True)
    assert deepseek.act is ActFormat.MXINT8
    assert deepseek.routed_scale == 1.5
    qwen = read(PRESETS["qwen3-30b-a3b"])
    assert (qwen.gate, qwen.limit, qwen.routed_scale) == (GateKind.SILU, None, 1.0)


def test_kimi_k3_routes_in_a_latent_space() -> None:
    text = {
        "hidden_size": 7168,
        "routed_expert_hidden_size": 3584,
        "num_hidden_layers": 6,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "moe_intermediate_size": 3072,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 2,
        "hidden_act": "situ",
        "quantization_config": PACKED_MXFP4,
    }
    g = read({"model_type": "kimi_k3", "text_config": text})
    assert (g.hidden, g.experts, g.top_k, g.moe_layers) == (3584, 896, 16, (2, 4))
    assert g.expert_format is ExpertFormat.MXFP4
    with pytest.raises(BrokenCheckpoint, match="'situ'") as caught:
        _ = g.gate
    assert caught.value.fault is Fault.UNSUPPORTED_EXPERTS


def test_qwen4_exp_is_read_from_its_text_part() -> None:
    text = {
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
    }
    config = {
        "model_type": "qwen4_exp",
        "text_config": text,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    g = read(config)
    assert g.moe_layers == (3,)
    assert g.expert_format is ExpertFormat.FP8


QUANTISED = {
    "bf16": (None, ExpertFormat.BF16),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ExpertFormat.NVFP4),
    "nvfp4 packed": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        ExpertFormat.NVFP4,
    ),
    "int4": ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, ExpertFormat.INT4),
    "mixed": (
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {"a": {"format": "mxfp4-pack-quantized"}},
        },
        ExpertFormat.MXFP4,
    ),
}


@pytest.mark.parametrize("name", QUANTISED)
def test_expert_formats_are_recognised(name: str) -> None:
    quant, wanted = QUANTISED[name]
    config = {**PRESETS["qwen3-30b-a3b"], "quantization_config": quant}
    assert read(config).expert_format is wanted


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, ExpertFormat.MXFP4),
        ({"expert_dtype": None}, ExpertFormat.MXFP4),  # what V4 checkpoints without the word are
        ({"expert_dtype": "fp8"}, ExpertFormat.FP8),
        (
            {"quantization_config": {"quant_method": "fp8", "moe_quant_algo": "NVFP4"}},
            ExpertFormat.NVFP4,
        ),
    ],
)
def test_deepseek_names_its_expert_format(change: dict[str, Any], wanted: ExpertFormat) -> None:
    assert read({**PRESETS["deepseek-v4-flash"], **change}).expert_format is wanted


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_are_matched_whole(layout: str) -> None:
    names = LAYOUTS[layout]
    pattern = name_pattern(names)
    where = {"p": names.prefixes[-1], "i": 12, "e": 3, "m": names.down}
    for template in filter(None, (names.codes, names.scales, names.bias)):
        match = pattern.fullmatch(template.format(**where))
        assert match
        assert match["i"] == "12"
        assert names.fused or match["e"] == "3"
        for near in ("x" + template, template + "x", template.replace("{i}", "012")):
            assert not pattern.fullmatch(near.format(**where))


def test_draft_layers_are_not_the_models_own() -> None:
    pattern = name_pattern(LAYOUTS["deepseek"])
    assert not pattern.fullmatch("mtp.0.ffn.experts.0.w1.weight")
    assert not pattern.fullmatch("layers.0.ffn.shared_experts.w1.weight")


def test_every_architecture_has_names() -> None:
    assert {a.layout for a in ARCHITECTURES.values()} == LAYOUTS.keys()
