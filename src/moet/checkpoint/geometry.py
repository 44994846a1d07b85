"""What config.json says about a model's routed experts: one frozen ``ModelGeometry``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moet.checkpoint.families import (
    ARCHITECTURES,
    GATES,
    LAYOUTS,
    QUANT_FORMATS,
    Architecture,
    ExpertFormat,
    MoeRule,
)
from moet.checkpoint.faults import BrokenCheckpoint, Fault, require_regular
from moet.checkpoint.header import strict_json
from moet.formats.gate import GateKind
from moet.formats.mxint import ActFormat

CONFIG = "config.json"
_MAX_CONFIG_BYTES = 16 << 20
_MAX_NUMBER = 1 << 24  # no dimension of a real model comes near; bounds every product below
_MAX_LAYERS = 1 << 12
_COUNTS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """The routed experts of a model.

    Attributes:
        architecture: ``model_type`` of config.json.
        layout: key of ``families.LAYOUTS``: what the expert tensors are called.
        hidden: width that the experts read and write (the latent one where the model has one).
        intermediate: width of h, between gate/up and down.
        layers: all layers of the model, drafts not counted.
        moe_layers: indices of those with routed experts.
        draft_layers: layers that follow the model's own in the same name space (MTP).
        experts: routed experts a layer.
        top_k: experts a token.
        expert_format: how they are stored.
        act: activation format that the model is served with unless asked otherwise.
        activation: what the config calls the gate; ``gate`` is the kernels' name of it.
        limit: clamp of gate and up, None where the model has none.
        biased: whether gate, up and down have biases.
        routed_scale: factor of the routed experts' sum (whether the router or the layer applies
            it is the engine's business).
    """

    architecture: str
    layout: str
    hidden: int
    intermediate: int
    layers: int
    moe_layers: tuple[int, ...]
    draft_layers: int
    experts: int
    top_k: int
    expert_format: ExpertFormat
    act: ActFormat
    activation: str
    limit: float | None
    biased: bool
    routed_scale: float

    @property
    def gate(self) -> GateKind:
        """How gate and up become h.

        Raises:
            BrokenCheckpoint: UNSUPPORTED_EXPERTS, no kernel has this activation.
        """
        if self.activation not in GATES:
            what = f"the activation {self.activation!r:.60} of its experts has no kernel"
            raise BrokenCheckpoint(Fault.UNSUPPORTED_EXPERTS, self.architecture, what)
        return GATES[self.activation]


class _Reader:
    """Typed reads of one JSON object; what is missing or odd is named."""

    def __init__(self, values: dict[str, Any], file: Path) -> None:
        self.values = values
        self.file = file

    def fail(self, what: str) -> BrokenCheckpoint:
        return BrokenCheckpoint(Fault.BAD_CONFIG, self.file, what)

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if type(value) is not int or not least <= value <= _MAX_NUMBER:
            said = "is missing" if value is None else f"is {value!r:.80}"
            raise self.fail(f"{key} {said}; a whole number from {least} up was expected")
        return value

    def number(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is not None and (type(value) not in (int, float) or not 0 < value < 1e30):
            raise self.fail(f"{key} is {value!r:.80}, not a positive number")
        return None if value is None else float(value)

    def section(self, key: str) -> dict[str, Any]:
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.fail(f"{key} is not an object")
        return value or {}

    def listing(self, key: str, kind: type) -> list[Any]:
        value = self.values.get(key)
        if value is not None and not (
            isinstance(value, list) and all(type(v) is kind for v in value)
        ):
            raise self.fail(f"{key} is not a list of {kind.__name__}")
        return value or []


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder as a dict.

    Raises:
        BrokenCheckpoint: UNREADABLE, BAD_CONFIG, DUPLICATE_KEY or NOT_UTF8.
    """
    file = folder / CONFIG if folder.is_dir() else folder
    try:
        require_regular(file)
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise BrokenCheckpoint(Fault.BAD_CONFIG, file, f"more than {_MAX_CONFIG_BYTES} bytes")
        raw = file.read_bytes()
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise BrokenCheckpoint(Fault.UNREADABLE, file, what) from error
    config = strict_json(raw, file, Fault.BAD_CONFIG)
    if not isinstance(config, dict):
        raise BrokenCheckpoint(Fault.BAD_CONFIG, file, "it is not a JSON object")
    return config


def _architecture(config: dict[str, Any], file: Path) -> tuple[str, Architecture]:
    name = config.get("model_type")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        what = f"model_type {name!r:.80} is not known; known are {known}"
        raise BrokenCheckpoint(Fault.UNKNOWN_ARCHITECTURE, file, what)
    return name, ARCHITECTURES[name]


def _moe_layers(rule: MoeRule, layers: int, text: _Reader) -> tuple[int, ...]:
    if rule is MoeRule.ALL:
        return tuple(range(layers))
    if rule is MoeRule.SPARSE_STEP:
        step = text.integer("decoder_sparse_step", 1)
        dense = set(text.listing("mlp_only_layers", int))
        return tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    if kinds := text.listing("mlp_layer_types", str):
        return tuple(i for i, kind in enumerate(kinds[:layers]) if kind != "dense")
    first = text.integer("first_k_dense_replace", 0, least=0)
    every = text.integer("moe_layer_freq", 1)
    return tuple(i for i in range(first, layers) if i % every == 0)


def _quant_names(quant: dict[str, Any]) -> tuple[str, str]:
    """(quant_method, format or algorithm) of a quantization_config."""
    method = str(quant.get("quant_method", ""))
    detail = str(quant.get("format") or quant.get("quant_algo") or "")
    if detail == "mixed-precision":  # compressed-tensors: the format is in the groups
        groups = quant.get("config_groups")
        formats = (
            {str(g.get("format")) for g in groups.values()} if isinstance(groups, dict) else set()
        )
        detail = formats.pop() if len(formats) == 1 else detail
    return method, detail


def expert_format(config: dict[str, Any], text: dict[str, Any], file: Path) -> ExpertFormat:
    """How the routed experts are stored, from the quantisation part of a config.

    Raises:
        BrokenCheckpoint: UNSUPPORTED_EXPERTS, a scheme that is not in the table.
    """
    quant = config.get("quantization_config") or text.get("quantization_config")
    if not quant:
        return ExpertFormat.BF16
    if not isinstance(quant, dict):
        raise BrokenCheckpoint(Fault.BAD_CONFIG, file, "quantization_config is not an object")
    method, detail = _quant_names(quant)
    if method == "fp8":  # DeepSeek-V4: FP8 linears; the experts have their own word for it
        default = "fp4" if str(config.get("model_type")).startswith("deepseek_v4") else ""
        asked = (
            quant.get("moe_quant_algo") or config.get("expert_dtype") or text.get("expert_dtype")
        )
        detail = str(asked or quant.get("expert_dtype") or default).removeprefix("fp8")
    if (method, detail) not in QUANT_FORMATS:
        what = f"quantisation {method!r:.60} {detail!r:.60} of the experts is not known"
        raise BrokenCheckpoint(Fault.UNSUPPORTED_EXPERTS, file, what)
    return QUANT_FORMATS[method, detail]


def _first_present(keys: tuple[str, ...], text: _Reader) -> int:
    present = [key for key in keys if text.values.get(key) is not None]
    return text.integer(present[0] if present else keys[-1])


def _draft_layers(text: _Reader) -> int:
    return text.integer("num_nextn_predict_layers", 0, least=0)


def read_geometry(config: dict[str, Any], file: Path) -> ModelGeometry:
    """The geometry of a model from its parsed config.json.

    Args:
        config: the object.
        file: for the messages.

    Raises:
        BrokenCheckpoint: UNKNOWN_ARCHITECTURE, BAD_CONFIG, NO_EXPERTS, UNSUPPORTED_EXPERTS.
    """
    name, arch = _architecture(config, file)
    outer = _Reader(config, file)
    text = _Reader(outer.section("text_config") or config, file) if arch.nested else outer
    layers = text.integer("num_hidden_layers")
    if layers > _MAX_LAYERS:
        raise outer.fail(f"num_hidden_layers is {layers}; {_MAX_LAYERS} at most were expected")
    moe_layers = _moe_layers(arch.rule, layers, text)
    if not moe_layers or text.values.get(arch.experts) in (None, 0):
        raise BrokenCheckpoint(Fault.NO_EXPERTS, file, "the model has no routed experts")
    for key in _COUNTS:  # not of the experts; an engine divides by them
        if text.values.get(key) is not None:
            text.integer(key)
    geometry = ModelGeometry(
        architecture=name,
        layout=arch.layout,
        hidden=_first_present(arch.hidden, text),
        intermediate=text.integer(arch.intermediate),
        layers=layers,
        moe_layers=moe_layers,
        draft_layers=_draft_layers(text),
        experts=text.integer(arch.experts),
        top_k=text.integer(arch.top_k),
        expert_format=expert_format(config, text.values, file),
        act=ActFormat.MXINT8 if arch.int8 else ActFormat.MXINT16,
        activation=arch.activation or str(text.values.get("hidden_act", "silu")),
        limit=text.number(arch.limit) if arch.limit else None,
        biased=bool(LAYOUTS[arch.layout].bias),
        routed_scale=text.number("routed_scaling_factor") or 1.0,
    )
    if geometry.top_k > geometry.experts:
        raise outer.fail(f"{arch.top_k} is {geometry.top_k} of {geometry.experts} experts")
    return geometry
