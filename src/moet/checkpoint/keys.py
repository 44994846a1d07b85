"""Names of routed experts, and the orders to go through them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from moet.checkpoint.geometry import ModelGeometry
from moet.checkpoint.open import Checkpoint


class ExpertKey(NamedTuple):
    """Which expert a record is."""

    layer: int
    expert: int


def expert_keys(geometry: ModelGeometry) -> list[ExpertKey]:
    """Every routed expert of a model, layer by layer."""
    return [ExpertKey(i, e) for i in geometry.moe_layers for e in range(geometry.experts)]


def in_file_order(checkpoint: Checkpoint, keys: Iterable[ExpertKey]) -> list[ExpertKey]:
    """``keys`` in the order in which the experts lie in the files: a drive reads on."""

    def place(key: ExpertKey) -> tuple[str, int]:
        span = checkpoint.expert_tensors(*key).gate.codes
        return str(span.file), span.offset

    return sorted(keys, key=place)
