"""How a layer is laid over a card: blocks of threads, shared memory, work per block. Pure.

A stage (gate and up, or down) gives each block of threads a run of *units*: some pairs of strips
whose segment sums meet in shared memory. An item (a pair and a segment) is one warp's; so the
number of warps should divide the items of a unit. Each warp keeps `depth` groups of a pair in
flight.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

from moet.base.errors import KernelError
from moet.formats.mxint import ActFormat
from moet.formats.tiling import GROUP_BLOCKS, GROUP_BYTES, STRIP_ROWS, ceil_div
from moet.kernels.spec import LayerSpec

COLUMNS: Final = 8
"""Tokens of one MMA."""

MOST_WARPS: Final = 8
"""Of a block: `kMostThreads` of the device code."""

MOST_ROUTINGS: Final = 4096
"""Routings (token, slot) of one step: what the plan's shared memory and 16-bit indices allow."""

_BUSY_WARPS: Final = 5
_SEGMENT_BLOCKS: Final = 16
_SLOT_BYTES: Final = 2 * GROUP_BYTES
_ITEM_SUM_BYTES: Final = 2 * COLUMNS * 20 * 4
_RESERVED_SHARED: Final = 1024
_ENTRY_BYTES: Final = 16
_AHEAD_BYTES: Final = 40
_WORD_BYTES: Final = 8


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a plan must know about a GPU.

    Attributes:
        name: as the driver gives it.
        capability: (major, minor).
        multiprocessors: number of them.
        shared_per_block: most bytes of shared memory that one block can have.
        shared_per_multiprocessor: bytes that the blocks of a multiprocessor share.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage on one card.

    Attributes:
        warps: of a block.
        blocks: of the grid.
        unit_pairs: pairs of strips that a block finishes together.
        depth: ring slots of a warp.
        sum_buffers: 2 lets a block go on reading while the last unit's sums are finished.
        shared_bytes: dynamic shared memory of a block.
    """

    warps: int
    blocks: int
    unit_pairs: int
    depth: int
    sum_buffers: int
    shared_bytes: int


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Choices that change speed and no bit.

    Attributes:
        warps: of a multiprocessor, that the plan makes room for. The dot is bound by its latency:
            the more, the better; the kernels' registers allow 24 on cards with fast memory.
        deepest: most ring slots of a warp. Two already keep about 70 KB of a multiprocessor in
            flight with 24 warps.
        sum_buffers: most buffers of sums; with two, a block's warps go on to the next unit while
            the sums of the last one are being finished.
        spare_blocks: of a multiprocessor, left free for the next kernel to start in.
        overlap: launches may start while their predecessor runs (sm_90 and later).
    """

    warps: int = 24
    deepest: int = 3
    sum_buffers: int = 2
    spare_blocks: int = 0
    overlap: bool = True


def quantised_row_bytes(blocks: int, act: ActFormat) -> int:
    """Bytes of a quantised row of `blocks` blocks, its last group padded."""
    slices = act // 8
    return ceil_div(blocks, GROUP_BLOCKS) * (128 + 32) * slices


@dataclass(frozen=True, kw_only=True)
class StageShape:
    """What one stage has to do in the largest step.

    Attributes:
        pairs: of strips of an expert.
        blocks: KB of the matrix.
        multiple: a unit has a multiple of so many pairs.
        experts: E.
        routings: (token, slot) of a step.
    """

    pairs: int
    blocks: int
    multiple: int
    experts: int
    routings: int

    @property
    def segments(self) -> int:
        """Segments of K."""
        return ceil_div(self.blocks, _SEGMENT_BLOCKS)

    def shared_bytes(self, *, warps: int, unit_pairs: int, depth: int, sum_buffers: int) -> int:
        """Shared memory of a block: `part_shared_memory` of the device code in numbers."""
        return (
            warps * depth * (_SLOT_BYTES + _WORD_BYTES)
            + sum_buffers * unit_pairs * self.segments * _ITEM_SUM_BYTES
            + min(self.routings, self.experts) * _ENTRY_BYTES
            + warps * (_AHEAD_BYTES + _WORD_BYTES)
            + self.experts * 4
            + self.routings * 4
        )

    def unit(self) -> tuple[int, int]:
        """(unit_pairs, warps): the smallest unit that keeps enough warps busy."""
        for factor in (1, 2, 4):
            unit_pairs = factor * self.multiple
            items = unit_pairs * self.segments

            def busy(warps: int, items: int = items) -> tuple[float, int]:
                return items / ceil_div(items, warps), -warps

            warps = max(range(4, MOST_WARPS + 1), key=busy)
            if busy(warps)[0] >= _BUSY_WARPS or 2 * unit_pairs > self.pairs:
                break
        return unit_pairs, warps


def plan_stage(shape: StageShape, card: Card, tuning: Tuning) -> StagePlan:
    """The first that fits: many resident blocks, then two buffers of sums, then deep rings.

    Raises:
        KernelError: nothing fits.
    """
    unit_pairs, warps = shape.unit()
    residents = range(max(tuning.warps // warps, 1), 0, -1)
    depths = range(tuning.deepest, 1, -1)
    buffers = range(tuning.sum_buffers, 0, -1)
    for resident, sum_buffers, depth in itertools.product(residents, buffers, depths):
        share = card.shared_per_multiprocessor // resident - _RESERVED_SHARED
        size = shape.shared_bytes(
            warps=warps, unit_pairs=unit_pairs, depth=depth, sum_buffers=sum_buffers
        )
        if size <= min(card.shared_per_block, share):
            return StagePlan(
                warps=warps,
                blocks=max(resident - tuning.spare_blocks, 1) * card.multiprocessors,
                unit_pairs=unit_pairs,
                depth=depth,
                sum_buffers=sum_buffers,
                shared_bytes=size,
            )
    raise KernelError(
        f"a step of {shape.routings} routings at K = {32 * shape.blocks} needs more shared memory "
        f"than {card.name} has",
        hint="plan fewer tokens a step",
    )


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """A layer on a card, for steps of up to `max_tokens` tokens.

    Attributes:
        gate_up: the first stage.
        down: the second.
        token_row_bytes: of a quantised row of x.
        routing_row_bytes: of a quantised row of h.
        overlap: as in `Tuning`.
    """

    max_tokens: int
    gate_up: StagePlan
    down: StagePlan
    token_row_bytes: int
    routing_row_bytes: int
    overlap: bool


def plan_layer(
    spec: LayerSpec, card: Card, max_tokens: int, tuning: Tuning | None = None
) -> LayerPlan:
    """Plans a layer.

    Raises:
        KernelError: no tokens, more routings than a step can have, or too little shared memory.
    """
    tuning = Tuning() if tuning is None else tuning
    routings = max_tokens * spec.top_k
    if not 1 <= routings <= MOST_ROUTINGS:
        raise KernelError(
            f"max_tokens = {max_tokens} with top_k = {spec.top_k} makes {routings} routings",
            hint=f"a step on the card has 1..{MOST_ROUTINGS} routings; split longer calls",
        )
    hidden_blocks, intermediate_blocks = spec.hidden // 32, spec.intermediate // 32
    shapes = {
        "gate_up": StageShape(
            pairs=spec.intermediate // STRIP_ROWS,
            blocks=hidden_blocks,
            multiple=2,
            experts=spec.experts,
            routings=routings,
        ),
        "down": StageShape(
            pairs=spec.hidden // (2 * STRIP_ROWS),
            blocks=intermediate_blocks,
            multiple=1,
            experts=spec.experts,
            routings=routings,
        ),
    }
    return LayerPlan(
        max_tokens=max_tokens,
        gate_up=plan_stage(shapes["gate_up"], card, tuning),
        down=plan_stage(shapes["down"], card, tuning),
        token_row_bytes=quantised_row_bytes(hidden_blocks, spec.act),
        routing_row_bytes=quantised_row_bytes(intermediate_blocks, spec.act),
        overlap=tuning.overlap and card.capability >= (9, 0),
    )
