"""Routers and routed experts only: for families whose other tensors are not written here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moet.checkpoint.families import LAYOUTS
from moet.checkpoint.synth.moe import Moe
from moet.checkpoint.writer import TensorPlan


def plans(config: dict[str, Any], moe: Moe) -> Iterator[TensorPlan]:
    """The MoE tensors, in layer order; the router beside the experts, called ``gate``."""
    del config
    block = LAYOUTS[moe.geometry.layout].codes.split("experts.")[0]
    for layer in moe.geometry.moe_layers:
        yield moe.router(block.format(p=moe.prefix, i=layer) + "gate.weight", layer)
        yield from moe.experts(layer)
