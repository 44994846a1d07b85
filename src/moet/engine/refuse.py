"""What moet does not serve, refused by name before a byte of experts is read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from moet.base.errors import EngineError, UnsupportedError
from moet.checkpoint import ModelGeometry
from moet.engine import settings, versions
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
        "nnodes": "models spread over several machines",
    }
    for field, name in sizes.items():
        if (size := getattr(parallel, field, None) or 1) > 1:
            flag = "--" + field.replace("_", "-")
            yield f"{name} ({flag} {size})", f"leave out {flag}; use --tensor-parallel-size"
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


def _lora(asked: bool) -> Iterator[tuple[str, str]]:
    if asked:
        yield "LoRA adapters", "leave out --enable-lora"


def _drafts(method: str | None) -> Iterator[tuple[str, str]]:
    # vLLM 0.32's CPU build draws wrong tokens from drafts above temperature 0, with stock weights
    # too (docs/engine.md); a draft model would also need experts of its own.
    if method is not None:
        hint = "leave out --speculative-config and --spec-*"
        yield f"speculative decoding ({method})", hint


def _backend(name: str | None) -> Iterator[tuple[str, str]]:
    if name not in (None, "auto"):
        yield f"--moe-backend {name}", "leave it out: moet computes the experts"


def _loader_options(options: Any) -> Iterator[tuple[str, str]]:
    if options:
        yield "--model-loader-extra-config", "leave it out: moet reads the checkpoint itself"


def _feature_faults(config: Any) -> Iterator[tuple[str, str]]:
    draft = config.speculative_config
    yield from _lora(config.lora_config is not None)
    yield from _drafts(None if draft is None else draft.method)
    yield from _backend(getattr(config.kernel_config, "moe_backend", None))
    yield from _loader_options(config.load_config.model_loader_extra_config)
    if getattr(config.quant_config, "online_quantization_config", None) is not None:
        yield "online quantisation", "leave out --quantization"


def _draft_method(args: Any) -> str | None:
    """The method that flags name, or what else shows that drafts are wanted; None: they are not."""
    config = getattr(args, "speculative_config", None)
    words = [getattr(args, name, None) for name in ("spec_method", "spec_model", "spec_tokens")]
    if config is None and words == [None] * 3:
        return None
    named = (config or {}).get("method") or words[0]
    return str(named or "a draft model")


def _argument_faults(args: Any) -> Iterator[tuple[str, str]]:
    yield from _parallel_faults(args)
    yield from _lora(bool(getattr(args, "enable_lora", False)))
    yield from _drafts(_draft_method(args))
    yield from _backend(getattr(args, "moe_backend", None))
    yield from _loader_options(getattr(args, "model_loader_extra_config", None))


def arguments(args: Any) -> None:
    """Refuses what flags ask for and moet has not: the user hears it before the engine starts.

    Args:
        args: a namespace with vLLM's names, of ``asked.read`` or of vLLM's own parser.

    Raises:
        UnsupportedError: names the first such thing.
        UsageError: a section ``moet`` of ``--additional-config`` that cannot be read.
    """
    for what, hint in _argument_faults(args):
        raise _refuse(what, hint)
    settings.read(getattr(args, "additional_config", None))


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
