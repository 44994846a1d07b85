"""`moet bench moe`: the GPU's kernels alone, as a record; others' times on the card beside them.

Others are measured elsewhere, in the same session, at the same boundary (top-k ids in, combined
rows out) and the same layer, and come as a JSON file:

    {"hidden": 4096, "intermediate": 2048, "experts": 256, "top_k": 6,
     "results": [{"who": "vLLM 0.26 Marlin", "tokens": 1, "us": 52.0}, ...]}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moet.base.errors import UsageError
from moet.bench import moe_gpu
from moet.bench.record import Record, Row, make_record
from moet.hybrid.card import MAX_TOKENS
from moet.kernels.cuda.gpu import Gpu
from moet.kernels.spec import LayerSpec

_SIZES: Final = ("hidden", "intermediate", "experts", "top_k")

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Other:
    """Somebody else's time.

    Attributes:
        who: name and version.
        tokens: of a step.
        us: of a step.
    """

    who: str
    tokens: int
    us: float


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Attributes:
        shapes: name -> layer.
        tokens: of a step, a list.
        launches: also each launch, alone.
        others: name of a shape -> others' times on it.
        seed: of experts and routings.
    """

    shapes: dict[str, LayerSpec]
    tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    launches: bool = False
    others: dict[str, tuple[Other, ...]]
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.tokens or not 1 <= min(self.tokens) <= max(self.tokens) <= MAX_TOKENS:
            hint = f"1 to {MAX_TOKENS}: moet bench moe --tokens 1,4,8"
            raise UsageError("tokens are out of range", hint=hint)


def read_others(path: Path, shapes: dict[str, LayerSpec]) -> dict[str, tuple[Other, ...]]:
    """Others' times from a file, under the name of the shape that they were measured on.

    Raises:
        UsageError: no such file, not that format, or a layer that is not measured.
    """
    hint = 'a file like {"hidden": 4096, ..., "results": [{"who": "A", "tokens": 1, "us": 52.0}]}'
    try:
        raw = json.loads(path.read_text())
        sizes = tuple(int(raw[name]) for name in _SIZES)
        found = tuple(
            Other(str(row["who"]), int(row["tokens"]), float(row["us"])) for row in raw["results"]
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} cannot be read: {error!r}", hint=hint) from error
    names = [n for n, s in shapes.items() if tuple(getattr(s, size) for size in _SIZES) == sizes]
    if not names or not all(other.us > 0 for other in found):
        given = ", ".join(f"{name} {size}" for name, size in zip(_SIZES, sizes, strict=True))
        raise UsageError(f"{path} has times of no layer that is measured: {given}", hint=hint)
    return {names[0]: found}


def run(gpu: Gpu, options: Options, progress: Progress = lambda what, share: None) -> Record:
    """Measures.

    Raises:
        KernelError: the experts of a layer do not fit on the card, or a launch fails.
    """
    read = moe_gpu.read_bandwidth(gpu, gpu.stream())
    rows: list[Row] = [{"kind": "read", "card_read_gb_s": read / 1e9}]
    for number, (name, spec) in enumerate(options.shapes.items()):
        progress(name, number / len(options.shapes))
        rows += _shape(gpu, name, spec, options, read)
    rows += [
        {"kind": "kernel", "name": kernel, "registers": gpu.registers(kernel)}
        for kernel in sorted({k for s in options.shapes.values() for k in _kernels(s)})
    ]
    setup = {
        "card": gpu.card.name,
        "shapes": {n: {size: getattr(s, size) for size in _SIZES} for n, s in _all(options)},
        "acts": {name: spec.act.name for name, spec in _all(options)},
        "steps_a_graph": moe_gpu.STEPS,
        "replays": moe_gpu.REPEATS,
        "seed": options.seed,
        "boundary": "top-k ids and weights in, combined bf16 rows out, routing included",
        "mode": "CUDA graph replay, new random experts each step",
    }
    return make_record("moe-gpu", setup, rows)


def _all(options: Options) -> list[tuple[str, LayerSpec]]:
    return list(options.shapes.items())


def _kernels(spec: LayerSpec) -> tuple[str, ...]:
    act = int(spec.act)
    return ("moet_quantise", f"moet_gate_up_{act}", f"moet_down_{act}", "moet_combine")


def _shape(gpu: Gpu, name: str, spec: LayerSpec, options: Options, read: float) -> Iterator[Row]:
    rig = moe_gpu.Rig(gpu, spec, max(options.tokens), options.seed)
    try:
        layer = rig.layer()
        for tokens in options.tokens:
            for timing in rig.measure(layer, tokens, launches=options.launches):
                yield {"kind": "gpu", "shape": name} | _row(timing, read)
                if timing.what == "step":
                    yield from _beside(name, timing, options.others.get(name, ()))
    finally:
        rig.close()


def _row(timing: moe_gpu.Timing, read: float) -> Row:
    return {
        "what": timing.what,
        "tokens": timing.tokens,
        "us": timing.microseconds,
        "experts": timing.experts,
        "bytes": timing.nbytes,
        "read_gb_s": read / 1e9,
        "ratio": timing.bytes_per_s / read,
    }


def _beside(name: str, timing: moe_gpu.Timing, others: tuple[Other, ...]) -> Iterator[Row]:
    for other in others:
        if other.tokens == timing.tokens:
            yield {
                "kind": "other",
                "shape": name,
                "who": other.who,
                "tokens": other.tokens,
                "us": other.us,
                "moet_us": timing.microseconds,
                "times_as_fast": other.us / timing.microseconds,
            }
