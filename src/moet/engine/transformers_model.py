"""A transformers model from a checkpoint folder, without its routed experts.

transformers lets a function stand in for the forward pass of its experts modules (its experts
interface; Qwen3-MoE, gpt-oss, DeepSeek, GLM and others have such modules). Ours is registered there
under the name ``moet`` and passes the call on to whatever was bound to the module. The experts'
parameters are taken out while the model has no memory yet; their tensors are never read here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import transformers
from transformers.integrations import moe as interface

from moet.base.errors import CheckpointError, EngineError, UnsupportedError
from moet.checkpoint import Checkpoint, ModelGeometry
from moet.engine import live

IMPLEMENTATION: Final = "moet"

Compute = Callable[[Any, Any, Any], Any]
"""x [T, H], weights [T, K], ids [T, K] -> [T, H]."""

_PLAIN: Final = {"BF16", "F16", "F32"}
_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MARKS: Final = ("is_transposed", "has_gate", "has_bias")


def register() -> None:
    """Adds ``moet`` to transformers' experts interface; may be called any number of times.

    Raises:
        EngineError: this transformers has no such interface.
    """
    try:
        interface.ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)
    except AttributeError as error:
        raise EngineError(
            f"transformers {transformers.__version__} has no experts interface: {error}",
            hint="install transformers 5.17 or newer",
        ) from error


def _forward(module: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    compute: Compute | None = getattr(module, "moet_compute", None)
    if compute is None:
        raise EngineError(
            f"a module of {type(module).__name__} runs before moet has loaded its experts",
            hint="load the model with moet's adapter, not with from_pretrained",
        )
    return compute(hidden_states, top_k_weights, top_k_index)


def bind(module: Any, compute: Compute) -> None:
    """Lets an experts module's forward passes go to ``compute``."""
    module.moet_compute = compute


def build(checkpoint: Checkpoint, dtype: Any, device: torch.device) -> Any:
    """The model, for inference alone, with every tensor but the routed experts'.

    Args:
        checkpoint: an open one; what is not a routed expert must be BF16, FP16 or FP32.
        dtype: of torch; None: the config's.
        device: where it goes.

    Raises:
        UnsupportedError: quantised tensors outside of the experts, or a model that transformers
            does not have, or not with its experts interface.
        CheckpointError: tensors are missing or of another shape.
        EngineError: transformers builds other experts than the checkpoint has.
    """
    register()
    config = _config(checkpoint)
    with _quietly():
        model, info = _class_of(config).from_pretrained(
            None,
            config=config,
            state_dict=_dense_tensors(checkpoint),
            dtype=dtype or "auto",
            experts_implementation=IMPLEMENTATION,
            output_loading_info=True,
        )
    _require_complete(checkpoint, info)
    _read_generation_config(model, checkpoint)
    return model.to(device).eval().requires_grad_(False)


@contextmanager
def _quietly() -> Iterator[None]:
    """No progress bar of transformers: a library does not print."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


def _config(checkpoint: Checkpoint) -> Any:
    """The folder's config without its quantisation: what is left is plain."""
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint.folder)
    except (ValueError, KeyError) as error:
        what = f"transformers cannot read the config of {checkpoint.geometry.architecture}: {error}"
        raise UnsupportedError(what, hint="serve it with vLLM: moet serve") from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _class_of(config: Any) -> Any:
    """The causal language model of a config, as a class whose experts have no parameters.

    Raises:
        UnsupportedError: transformers has none.
    """
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        what = f"transformers has no causal language model for {type(config).__name__}"
        raise UnsupportedError(what, hint="serve it with vLLM: moet serve")
    stock = mapping[type(config)]

    def build_empty(self: Any, *args: Any, **kwargs: Any) -> None:
        stock.__init__(self, *args, **kwargs)
        for module in _experts(self).values():
            _empty(module)

    # Under the stock class's name and module: transformers looks both up.
    members = {"__init__": build_empty, "__module__": stock.__module__}
    return type(stock.__name__, (stock,), members)


def _experts(model: Any) -> dict[str, Any]:
    """The experts modules by name: those that transformers' decorator has marked."""
    named = model.named_modules()
    return {n: m for n, m in named if all(hasattr(m, mark) for mark in _MARKS)}


def _empty(module: Any) -> None:
    """Takes the parameters out; how many numbers they were stays, to be compared."""
    module.moet_numbers = sum(p.numel() for p in module.parameters(recurse=False))
    for name in list(module._parameters):
        del module._parameters[name]
    module._is_hf_initialized = True  # there is nothing left that could be drawn at random


def _dense_tensors(checkpoint: Checkpoint) -> dict[str, Any]:
    """Every tensor that is not a routed expert's; the others are not asked for."""
    from safetensors import safe_open

    wanted = [t for n, t in checkpoint.tensors.items() if not checkpoint.is_routed_expert(n)]
    odd = sorted(t.name for t in wanted if t.dtype not in _PLAIN)
    if odd:
        raise UnsupportedError(
            f"{len(odd)} tensors outside of the routed experts are quantised, such as {odd[0]}",
            hint="the transformers adapter reads BF16, FP16 and FP32; serve the model with vLLM",
        )
    tensors: dict[str, Any] = {}
    for file in sorted({t.file for t in wanted}):
        with safe_open(file, framework="pt") as source:
            for name in (t.name for t in wanted if t.file == file):
                tensors[name] = source.get_tensor(name)
    return tensors


def _require_complete(checkpoint: Checkpoint, info: dict[str, Any]) -> None:
    kinds = ("missing_keys", "mismatched_keys", "error_msgs", "conversion_errors")
    wrong = {kind: sorted(map(str, found)) for kind in kinds if (found := info.get(kind))}
    if wrong:
        kind, names = next(iter(wrong.items()))
        what = f"{checkpoint.folder}: {kind.replace('_', ' ')}: {', '.join(names[:4])}"
        raise CheckpointError(what, hint="download the checkpoint again, all of its shards")


def _read_generation_config(model: Any, checkpoint: Checkpoint) -> None:
    if (checkpoint.folder / "generation_config.json").is_file():
        read = transformers.GenerationConfig.from_pretrained(checkpoint.folder)
        model.generation_config = read


def experts_by_layer(model: Any, geometry: ModelGeometry) -> dict[int, Any]:
    """The experts modules of a built model by decoder layer, checked against the checkpoint.

    Raises:
        UnsupportedError: a model whose experts are not behind the interface.
        EngineError: other layers, sizes, biases or clamps than the checkpoint has.
    """
    named = _experts(model)
    if not named:
        what = f"transformers' {type(model).__name__} does not use the experts interface"
        raise UnsupportedError(what, hint="serve it with vLLM: moet serve")
    found = {_layer_of(name): module for name, module in named.items()}
    live.require_all_bound(geometry.moe_layers, list(found))
    for layer, module in found.items():
        _require_same(layer, module, geometry)
    return found


def _layer_of(name: str) -> int:
    match = _LAYER.search(name)
    if match is None:
        hint = "this model is built in a way that moet does not cover; serve it with vLLM"
        raise EngineError(f"the experts module {name} has no layer number", hint=hint)
    return int(match[1])


def _require_same(layer: int, module: Any, geometry: ModelGeometry) -> None:
    """Shapes differ between families, the count of numbers does not."""
    one = 3 * geometry.hidden * geometry.intermediate
    one += geometry.biased * (geometry.hidden + 2 * geometry.intermediate)
    given = (module.moet_numbers, bool(module.has_bias), bool(module.has_gate))
    wanted = (geometry.experts * one, geometry.biased, True)
    limits = (getattr(module, "limit", None), geometry.limit)
    if given != wanted or limits[0] != limits[1]:
        raise EngineError(
            f"the experts of layer {layer} are (numbers, biased, gated) {given} with the clamp "
            f"{limits[0]} to transformers, {wanted} with {limits[1]} to moet",
            hint="this model is built in a way that moet does not cover; serve it with vLLM",
        )
