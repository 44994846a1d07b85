"""A config cut to fewer layers, experts or words; every list and count that depends follows."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

from moet.base.errors import UsageError
from moet.checkpoint.families import ARCHITECTURES, ExpertFormat
from moet.checkpoint.faults import BrokenCheckpoint, Fault
from moet.checkpoint.geometry import CONFIG, expert_format, read_config, read_geometry
from moet.checkpoint.synth.presets import PACKED_MXFP4, PRESETS, PUBLISHED

_PER_LAYER = ("layer_types", "compress_ratios", "mlp_layer_types")
_LEADING = ("first_k_dense_replace", "num_hash_layers")  # counts of special layers at the front


def published_format(name: str) -> str:
    """How the experts of a preset, or of a config.json, are stored where the model comes from.

    Raises:
        BrokenCheckpoint: as ``named_config``.
    """
    if name in PRESETS:
        return PUBLISHED.get(name, ExpertFormat.MXFP4.value)
    config = _read(name)
    return read_geometry(config, Path(name)).expert_format.value


def _read(name: str) -> dict[str, Any]:
    path = Path(name)
    if not path.exists():
        what = f"neither a preset nor a path; presets are {', '.join(PRESETS)}"
        raise BrokenCheckpoint(Fault.UNKNOWN_PRESET, name, what)
    return read_config(path)


def named_config(name: str) -> dict[str, Any]:
    """A preset by name, or a config.json by path (of the file or of its folder); a copy.

    A config whose experts are not MXFP4 gets MXFP4 ones (see ``presets``).

    Raises:
        BrokenCheckpoint: UNKNOWN_PRESET, or what is wrong with the file.
    """
    if name in PRESETS:
        return deepcopy(PRESETS[name])
    path, config = Path(name), _read(name)
    read_geometry(config, path)
    text = config.get("text_config") if ARCHITECTURES[config["model_type"]].nested else None
    if expert_format(config, text or config, path) is not ExpertFormat.MXFP4:
        config["quantization_config"] = deepcopy(PACKED_MXFP4)
    return config


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that holds the language model's numbers."""
    nested = ARCHITECTURES[config["model_type"]].nested
    part: dict[str, Any] = config["text_config"] if nested and "text_config" in config else config
    return part


def _cut_layers(text: dict[str, Any], layers: int) -> None:
    """Keeps ``layers`` layers. Special ones at the front go first, so that a short cut of a model
    that starts with dense or hash-routed layers has ordinary MoE layers."""
    dropped = text["num_hidden_layers"] - layers
    text["num_hidden_layers"] = layers
    for key in _LEADING:
        if text.get(key):
            text[key] = max(0, text[key] - dropped)
    for key in _PER_LAYER:
        if text.get(key):
            text[key] = text[key][:layers]
    if "max_window_layers" in text:
        text["max_window_layers"] = layers


def _cut_vocab(text: dict[str, Any], vocab: int) -> None:
    """Special tokens past the end become the last word: an embedding has no other row for them."""
    text["vocab_size"] = vocab
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if type(text.get(key)) is int:
            text[key] = min(text[key], vocab - 1)


def cut_config(
    config: dict[str, Any], *, layers: int | None, experts: int | None, vocab: int | None
) -> dict[str, Any]:
    """A cut copy of a config; None keeps a number.

    Raises:
        UsageError: a number below 1 or above the model's own, or fewer experts than top-k.
    """
    config = deepcopy(config)
    geometry = read_geometry(config, Path(CONFIG))
    arch, text = ARCHITECTURES[config["model_type"]], text_part(config)
    own = {"layers": geometry.layers, "experts": geometry.experts, "vocab": text.get("vocab_size")}
    for name, value in (("layers", layers), ("experts", experts), ("vocab", vocab)):
        if value is not None and not 1 <= value <= (own[name] or value):
            hint = f"this model has 1 to {own[name]} {name}"
            raise UsageError(f"--{name} {value} is out of range", hint=hint)
    if experts is not None and experts < geometry.top_k:
        hint = f"each token goes to {geometry.top_k} experts: keep so many at least"
        raise UsageError(f"--experts {experts} is fewer than top-{geometry.top_k}", hint=hint)
    if layers is not None:
        _cut_layers(text, layers)
    if experts is not None:
        text[arch.experts] = experts
    if vocab is not None:
        _cut_vocab(text, vocab)
    if text.get("num_nextn_predict_layers"):
        text["num_nextn_predict_layers"] = 0  # drafts are not written
    return config
