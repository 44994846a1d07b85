"""What moet does not serve, refused by name before a byte of experts is read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from moet.base.errors import EngineError, UnsupportedError
from moet.checkpoint import ModelGeometry
from moet.engine import versions
from moet.formats.gate import GateKind

# The engine's name of each gate's activation.
ACTIVATIONS = {
    GateKind.SILU: "silu",
    GateKind.GPT_OSS: "swigluoai",
    GateKind.GELU_TANH: "gelu_tanh",
}


def _refuse(what: str, hint: str) -> UnsupportedError:
    return UnsupportedError(f"moet does not serve {what}", hint=hint)


def _platform_faults() -> Iterator[tuple[str, str]]:
    if not sys.platform.startswith("linux"):
        yield f"models on {sys.platform}", "use Linux"
    if not versions.is_cpu_platform():
        yield "models on this accelerator yet", "install the CPU build: `pip install moet[cpu]`"


def _parallel_faults(parallel: Any) -> Iterator[tuple[str, str]]:
    sizes = {
        "data_parallel_size": "data parallelism",
        "pipeline_parallel_size": "pipeline parallelism",
        "prefill_context_parallel_size": "prefill context parallelism",
    }
    for field, name in sizes.items():
        if getattr(parallel, field, 1) > 1:
            flag = "--" + field.replace("_", "-")
            yield f"{name} ({flag} {getattr(parallel, field)})", "use --tensor-parallel-size"
    switches = {
        "enable_eplb": ("expert-parallel load balancing", "leave out --enable-eplb"),
        "enable_expert_parallel": (
            "expert parallelism",
            "leave out --enable-expert-parallel; tensor parallelism splits every expert",
        ),
        "enable_elastic_ep": ("elastic expert parallelism", "leave out --enable-elastic-ep"),
    }
    for field, (name, hint) in switches.items():
        if getattr(parallel, field, False):
            yield name, hint


def _feature_faults(config: Any) -> Iterator[tuple[str, str]]:
    if config.lora_config is not None:
        yield "LoRA adapters", "leave out --enable-lora"
    draft = config.speculative_config
    if draft is not None:
        # vLLM 0.32's CPU build draws wrong tokens from drafts above temperature 0, with stock
        # weights too (docs/engine.md); a draft model would also need experts of its own.
        yield f"speculative decoding ({draft.method})", "leave out --speculative-config"
    backend = getattr(config.kernel_config, "moe_backend", "auto")
    if backend != "auto":
        yield f"--moe-backend {backend}", "leave it out: moet computes the experts"
    if getattr(config.quant_config, "online_quantization_config", None) is not None:
        yield "online quantisation", "leave out --quantization"


def engine_config(config: Any) -> None:
    """Refuses what a vLLM config asks for and moet has not.

    Raises:
        UnsupportedError: names the first such thing.
    """
    faults = (_platform_faults(), _parallel_faults(config.parallel_config), _feature_faults(config))
    for kind in faults:
        for what, hint in kind:
            raise _refuse(what, hint)


def layer(routed: Any) -> None:
    """Refuses one MoE layer that the engine wants built (a ``RoutedExperts`` of vLLM).

    Raises:
        UnsupportedError: names what the layer has that moet has not.
    """
    moe = routed.moe_config
    parallel = moe.moe_parallel_config
    faults = {
        "expert parallelism": parallel.use_ep,
        "expert-parallel load balancing": parallel.enable_eplb,
        "sequence-parallel MoE layers": parallel.is_sequence_parallel,
        "LoRA on experts": moe.is_lora_enabled,
        "router weights applied to the input": routed.apply_router_weight_on_input,
        "shared experts fused into the routed ones": moe.num_logical_experts
        != routed.global_num_experts
        or routed.expert_map_manager.num_fused_shared_experts > 0,
        f"the activation {moe.activation.value!r}": moe.activation.value
        not in ACTIVATIONS.values(),
    }
    for what, present in faults.items():
        if present:
            hint = f"layer {routed.layer_name} needs it; serve this model without moet"
            raise _refuse(what, hint)


def mismatch(routed: Any, model: ModelGeometry) -> None:
    """The engine and moet must have read the same layer out of the checkpoint's config.

    Raises:
        EngineError: names the first number in which they differ.
    """
    moe = routed.moe_config
    views = {
        "hidden size": (moe.hidden_dim, model.hidden),
        "intermediate size": (moe.intermediate_size, model.intermediate),
        "experts": (routed.global_num_experts, model.experts),
        "experts a token": (routed.top_k, model.top_k),
        "activation": (moe.activation.value, ACTIVATIONS[model.gate]),
        "biases": (moe.has_bias, model.biased),
    }
    if model.gate is not GateKind.GPT_OSS:  # there the limit is part of the activation
        views["clamp"] = (routed.swiglu_limit, model.limit)
    for name, (engine, checkpoint) in views.items():
        if engine != checkpoint:
            raise EngineError(
                f"{routed.layer_name}: {name} is {engine} to the engine and {checkpoint} to moet",
                hint="this model is built in a way that moet does not cover",
            )
