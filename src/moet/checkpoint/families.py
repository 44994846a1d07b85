"""Architectures and their tensor names, as data. Supporting one more is a row, not a branch.

An ``Architecture`` says where config.json keeps each number; a ``Layout`` says what the tensors of
routed experts are called and how they are cut. ``{p}`` is a prefix, ``{i}`` a layer, ``{e}`` an
expert. gate, up and down are w1, w3 and w2 elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moet.formats.gate import GateKind


class ExpertFormat(StrEnum):
    """How routed experts are stored. Only MXFP4 is computed in this release."""

    MXFP4 = "MXFP4"
    NVFP4 = "NVFP4"
    INT4 = "INT4"
    FP8 = "FP8"
    BF16 = "BF16"


class MoeRule(StrEnum):
    """Which layers have routed experts."""

    ALL = "all"
    SPARSE_STEP = "sparse step"  # decoder_sparse_step, mlp_only_layers
    FIRST_DENSE = "first dense"  # first_k_dense_replace, moe_layer_freq, or mlp_layer_types


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Names of the MXFP4 tensors of routed experts.

    Attributes:
        codes: name of the codes of one matrix, ``{m}`` the matrix; ``uint8[N, K / 2]``, or
            ``[E, N, K / 32, 16]`` where ``fused``.
        scales: name of its scale bytes; ``uint8[N, K / 32]``, or ``[E, N, K / 32]``.
        bias: name of its bias, bf16 ``[E, N]``; empty: none.
        gate, up, down: what ``{m}`` is. Equal gate and up: one tensor holds both, rows 2n and
            2n + 1 being gate row n and up row n.
        prefixes: what ``{p}`` may be, first match wins.
        fused: all experts of a layer in one tensor.
    """

    codes: str
    scales: str
    gate: str
    up: str
    down: str
    bias: str = ""
    prefixes: tuple[str, ...] = ("",)
    fused: bool = False


# The same names hold the unquantised experts, so the prefixes are those of the plain models.
_MODEL = ("model.", "language_model.model.", "model.language_model.")

LAYOUTS: dict[str, Layout] = {
    # compressed-tensors, format mxfp4-pack-quantized
    "packed": Layout(
        codes="{p}layers.{i}.mlp.experts.{e}.{m}.weight_packed",
        scales="{p}layers.{i}.mlp.experts.{e}.{m}.weight_scale",
        gate="gate_proj",
        up="up_proj",
        down="down_proj",
        prefixes=_MODEL,
    ),
    # the same, in the names of Kimi Linear and Kimi-K3
    "packed_kimi": Layout(
        codes="{p}layers.{i}.block_sparse_moe.experts.{e}.{m}.weight_packed",
        scales="{p}layers.{i}.block_sparse_moe.experts.{e}.{m}.weight_scale",
        gate="w1",
        up="w3",
        down="w2",
        prefixes=_MODEL,
    ),
    "deepseek": Layout(
        codes="{p}layers.{i}.ffn.experts.{e}.{m}.weight",
        scales="{p}layers.{i}.ffn.experts.{e}.{m}.scale",
        gate="w1",
        up="w3",
        down="w2",
        prefixes=("", "model."),
    ),
    "gpt_oss": Layout(
        codes="{p}layers.{i}.mlp.experts.{m}_blocks",
        scales="{p}layers.{i}.mlp.experts.{m}_scales",
        bias="{p}layers.{i}.mlp.experts.{m}_bias",
        gate="gate_up_proj",
        up="gate_up_proj",
        down="down_proj",
        prefixes=("model.",),
        fused=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Where one ``model_type`` keeps its geometry in config.json.

    Attributes:
        layout: key of ``LAYOUTS``.
        nested: the numbers are under ``text_config``.
        experts, top_k, intermediate, hidden: keys of the numbers. ``hidden`` may list several:
            the first that is present is the width that routed experts see.
        rule: which layers are MoE.
        activation: a key of ``GATES``; empty: the config's ``hidden_act``.
        limit: key of the clamp of gate and up; empty: none.
        int8: the model was trained with 8-bit activations (MXINT8 by default, else MXINT16).
    """

    layout: str
    nested: bool = False
    experts: str = "num_experts"
    top_k: str = "num_experts_per_tok"
    intermediate: str = "moe_intermediate_size"
    hidden: tuple[str, ...] = ("hidden_size",)
    rule: MoeRule = MoeRule.FIRST_DENSE
    activation: str = ""
    limit: str = ""
    int8: bool = False


_DEEPSEEK_V3 = Architecture(layout="packed", experts="n_routed_experts")
_DEEPSEEK_V4 = Architecture(
    layout="deepseek", experts="n_routed_experts", rule=MoeRule.ALL, limit="swiglu_limit", int8=True
)
_QWEN = Architecture(layout="packed", rule=MoeRule.SPARSE_STEP)
_KIMI = Architecture(
    layout="packed_kimi",
    top_k="num_experts_per_token",
    hidden=("routed_expert_hidden_size", "hidden_size"),
)


def _nested(base: Architecture) -> Architecture:
    return Architecture(**{**base.__dict__, "nested": True})


# Keyed by the config's model_type. A nested config is looked up by the outer type.
ARCHITECTURES: dict[str, Architecture] = {
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "deepseek_v4": _DEEPSEEK_V4,
    "deepseek_v41": _nested(_DEEPSEEK_V4),
    "glm4_moe": _DEEPSEEK_V3,
    "glm4_moe_lite": _DEEPSEEK_V3,
    "glm_moe_dsa": _DEEPSEEK_V3,
    "gpt_oss": Architecture(
        layout="gpt_oss",
        experts="num_local_experts",
        intermediate="intermediate_size",
        rule=MoeRule.ALL,
        activation="gpt_oss",
        limit="swiglu_limit",
    ),
    "kimi_k2": _DEEPSEEK_V3,
    "kimi_k25": _nested(_DEEPSEEK_V3),
    "kimi_k3": _nested(_KIMI),
    "kimi_linear": _KIMI,
    "olmoe": Architecture(layout="packed", intermediate="intermediate_size", rule=MoeRule.ALL),
    "qwen3_moe": _QWEN,
    "qwen3_next": _QWEN,
    "qwen4_exp": _nested(_QWEN),
}

# hidden_act of config.json, as the kernels name their gates. gpt-oss says "silu" and means its own.
GATES: dict[str, GateKind] = {
    "silu": GateKind.SILU,
    "gelu_pytorch_tanh": GateKind.GELU_TANH,
    "gelu_tanh": GateKind.GELU_TANH,
    "gpt_oss": GateKind.GPT_OSS,
}

# quantization_config, by quant_method and, where it has one, its format or algorithm.
QUANT_FORMATS: dict[tuple[str, str], ExpertFormat] = {
    ("mxfp4", ""): ExpertFormat.MXFP4,
    ("compressed-tensors", "mxfp4-pack-quantized"): ExpertFormat.MXFP4,
    ("compressed-tensors", "nvfp4-pack-quantized"): ExpertFormat.NVFP4,
    ("compressed-tensors", "pack-quantized"): ExpertFormat.INT4,
    ("compressed-tensors", "float-quantized"): ExpertFormat.FP8,
    ("modelopt", "NVFP4"): ExpertFormat.NVFP4,
    ("modelopt_fp4", ""): ExpertFormat.NVFP4,
    ("modelopt", "FP8"): ExpertFormat.FP8,
    ("fp8", ""): ExpertFormat.FP8,
    ("fp8", "fp4"): ExpertFormat.MXFP4,
    ("fp8", "NVFP4"): ExpertFormat.NVFP4,
    ("awq", ""): ExpertFormat.INT4,
    ("gptq", ""): ExpertFormat.INT4,
}
