"""How a layer is laid over a card: blocks of threads, shared memory, work per block. Pure.

A stage (gate and up, or down) gives each block of threads *units* of four strips; a unit's segments
of K are the items of the block's warps, whose sums meet in shared memory. Each warp keeps up to
`depth` groups of four strips in flight.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

from moet.base.errors import KernelError
from moet.formats.mxint import ActFormat
from moet.formats.tiling import GROUP_BLOCKS, GROUP_BYTES, ceil_div
from moet.kernels.spec import LayerSpec

PLACES: Final = 8
"""Columns of one MMA: so many tokens of MXINT8, half as many of MXINT16."""

MOST_WARPS: Final = 16
"""Of a block, with the shared memory of data-centre cards: `kMostThreads` of the device code."""

FEWER_WARPS: Final = 12
"""The same on all others, whose code has more registers a thread instead."""

MOST_ROUTINGS: Final = 4096
"""Routings (token, slot) of one step: what the plan's shared memory and 16-bit indices allow."""

_SEGMENT_BLOCKS: Final = 16
_UNIT_STRIPS: Final = 4
_SLOT_BYTES: Final = _UNIT_STRIPS * GROUP_BYTES
_SUM_BYTES: Final = (16 * _UNIT_STRIPS + 4) * 4
_CHUNK_BYTES: Final = PLACES * 160
_GATHERINGS: Final = 8
_AHEAD_BYTES: Final = 176
_RESERVED_SHARED: Final = 1024
_ENTRY_BYTES: Final = 16
_WORD_BYTES: Final = 8
_DEEPEST: Final = 6
"""Slots of a ring: `kQueue` of the device code less two."""


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

    @property
    def most_warps(self) -> int:
        """Of a block of the stages' kernels."""
        big = self.capability in ((9, 0), (10, 0), (10, 3))
        return MOST_WARPS if big else FEWER_WARPS


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage on one card.

    Attributes:
        warps: of a block.
        blocks: of the grid.
        depth: ring slots of a warp.
        sum_columns: columns of one segment's sums that a block has room for.
        shared_bytes: dynamic shared memory of a block.
    """

    warps: int
    blocks: int
    depth: int
    sum_columns: int
    shared_bytes: int


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Choices that change speed and no bit.

    Attributes:
        warps: of a block, at most.
        resident: blocks of a multiprocessor.
        deepest: most ring slots of a warp.
        sum_tasks: room for the sums of so many tasks that have all the columns a task can have. A
            warp that is early with its sums waits where there is no room.
        overlap: launches may start while their predecessor runs (sm_90 and later).
    """

    warps: int = MOST_WARPS
    resident: int = 1
    deepest: int = 3
    sum_tasks: int = 2
    overlap: bool = True


def quantised_row_bytes(blocks: int, act: ActFormat) -> int:
    """Bytes of a quantised row of `blocks` blocks, its last group padded."""
    slices = act // 8
    return ceil_div(blocks, GROUP_BLOCKS) * (128 + 32) * slices


@dataclass(frozen=True, kw_only=True)
class StageShape:
    """What one stage has to do in the largest step.

    Attributes:
        blocks: KB of the matrix.
        experts: E.
        routings: (token, slot) of a step.
        columns: of a task, at most.
    """

    blocks: int
    experts: int
    routings: int
    columns: int

    def sum_columns(self, tasks: int) -> int:
        """Columns of sums of one segment, for so many tasks."""
        return tasks * ceil_div(self.blocks, _SEGMENT_BLOCKS) * self.columns

    def shared_bytes(self, *, warps: int, depth: int, sum_tasks: int) -> int:
        """Shared memory of a block: `part_shared_memory` of the device code in numbers."""
        of_warp = depth * (_SLOT_BYTES + _WORD_BYTES) + 2 * _CHUNK_BYTES + _AHEAD_BYTES + 4
        return (
            warps * of_warp
            + self.sum_columns(sum_tasks) * _SUM_BYTES
            + min(self.routings, self.experts) * _ENTRY_BYTES
            + 2 * _GATHERINGS * _WORD_BYTES
            + 4
            + self.experts * 4
            + self.routings * 4
        )


def plan_stage(shape: StageShape, card: Card, tuning: Tuning) -> StagePlan:
    """The first that fits: many warps, then room for sums, then deep rings.

    Raises:
        KernelError: nothing fits.
    """
    share = min(card.shared_per_block, card.shared_per_multiprocessor // tuning.resident)
    for warps, sum_tasks, depth in itertools.product(
        range(min(tuning.warps, card.most_warps), 0, -1),
        range(tuning.sum_tasks, 0, -1),
        range(min(tuning.deepest, _DEEPEST), 1, -1),
    ):
        size = shape.shared_bytes(warps=warps, depth=depth, sum_tasks=sum_tasks)
        if size <= share - _RESERVED_SHARED:
            return StagePlan(
                warps=warps,
                blocks=tuning.resident * card.multiprocessors,
                depth=depth,
                sum_columns=shape.sum_columns(sum_tasks),
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
    shapes = [
        StageShape(
            blocks=blocks,
            experts=spec.experts,
            routings=routings,
            columns=PLACES // (spec.act // 8),
        )
        for blocks in (hidden_blocks, intermediate_blocks)
    ]
    return LayerPlan(
        max_tokens=max_tokens,
        gate_up=plan_stage(shapes[0], card, tuning),
        down=plan_stage(shapes[1], card, tuning),
        token_row_bytes=quantised_row_bytes(hidden_blocks, spec.act),
        routing_row_bytes=quantised_row_bytes(intermediate_blocks, spec.act),
        overlap=tuning.overlap and card.capability >= (9, 0),
    )
