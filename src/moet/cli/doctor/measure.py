"""The doctor's two experiments: are the bits right, and how fast is one token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moet.bench.rig import Rig, Shape
from moet.formats.mxint import ActFormat
from moet.kernels import reference
from moet.kernels.cpu import Pool
from moet.kernels.spec import DType, LayerSpec
from moet.machine import Cpu
from moet.verify.cases import LayerCase, random_routing, random_x, widened

SHAPE = Shape(hidden=2048, intermediate=1024, experts=64, top_k=8)
TURNS = 9


@dataclass(frozen=True)
class Speeds:
    """Bytes a second: of a plain read loop, and of one token in each vocabulary."""

    read: float
    of: dict[str, float]


def differences(isa: str) -> int:
    """Outputs of a small layer that differ from the reference, over both activation formats."""
    rng = np.random.default_rng(0)
    pool, count = Pool(), 0
    for act in ActFormat:
        spec = LayerSpec(hidden=160, intermediate=96, experts=4, top_k=2, act=act)
        case = LayerCase.random(rng, spec)
        x = random_x(rng, 3, spec.hidden, DType.BF16)
        ids, weights = random_routing(rng, 3, spec)
        ours = case.layer(pool, isa).run(x, ids, weights)
        theirs = reference.moe_layer(spec, widened(x), ids, weights, case.experts)
        count += int((ours.view(np.uint32) != theirs.view(np.uint32)).sum())
    return count


def _median_seconds(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(TURNS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def speeds(cpu: Cpu) -> Speeds:
    """Times every vocabulary on one layer of ordinary size."""
    pool = Pool()
    rig = Rig(SHAPE, 1, seed=0)
    read = rig.arena.bytes.size / _median_seconds(rig.probe(pool).run)
    rates = {}
    for isa in cpu.isa:
        layer = rig.layer(ActFormat.MXINT16, pool, isa)
        seconds = _median_seconds(lambda layer=layer: rig.step(layer, rig.work(1))())  # type: ignore[misc]
        rates[isa] = SHAPE.top_k * rig.expert_bytes / seconds
    return Speeds(read=read, of=rates)
