"""One MoE layer in memory with random experts, made fast: what the CPU bench runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import MachineError, UsageError
from moet.base.units import format_bytes
from moet.formats.mxfp4 import BLOCK
from moet.formats.tiling import GROUP_BYTES, TILE_BYTES
from moet.kernels.cpu import CpuLayer, Pool, ReadProbe
from moet.kernels.spec import ActFormat, DType, LayerSpec
from moet.machine.memory import read_memory
from moet.tiers.arena import Arena

SCALES = (118, 127)
"""Scale bytes as trained models have them."""

MOST_WIDE = 1 << 20
MOST_EXPERTS = 1 << 16
"""No model comes near; the products of such sizes still fit everywhere."""

READ_BYTES = 512 << 20
"""What a pass of the read loop touches, at least (the experts, where they are larger): more than
the last-level cache of any core complex, so that it is the memory that is measured."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The layer that is measured: DeepSeek-V4-Flash's, unless asked otherwise.

    Raises:
        UsageError: no layer has these sizes.
    """

    hidden: int = 4096
    intermediate: int = 2048
    experts: int = 64
    top_k: int = 6

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate"):
            size = getattr(self, name)
            if not 0 < size <= MOST_WIDE or size % BLOCK:
                hint = f"take a multiple of {BLOCK}, at most {MOST_WIDE}"
                raise UsageError(f"{name} size {size} has no whole blocks of {BLOCK}", hint=hint)
        if not 1 <= self.top_k <= self.experts <= MOST_EXPERTS:
            hint = f"take 1 <= top-k <= experts <= {MOST_EXPERTS}"
            raise UsageError(f"top-{self.top_k} of {self.experts} experts", hint=hint)

    def spec(self, act: ActFormat) -> LayerSpec:
        """The layer's spec with one activation format."""
        return LayerSpec(
            hidden=self.hidden,
            intermediate=self.intermediate,
            experts=self.experts,
            top_k=self.top_k,
            act=act,
        )


@dataclass(frozen=True)
class Work:
    """One call: random distinct experts for each of T tokens.

    Attributes:
        ids: int32 [T, K].
        weights: fp32 [T, K].
        touched: experts that the call needs.
    """

    ids: NDArray[np.int32]
    weights: NDArray[np.float32]
    touched: int


def random_work(rng: np.random.Generator, tokens: int, shape: Shape) -> Work:
    """A new random call."""
    order = rng.random((tokens, shape.experts)).argsort(axis=1)
    ids = np.ascontiguousarray(order[:, : shape.top_k].astype(np.int32))
    return Work(ids, rng.random(ids.shape, np.float32), len(np.unique(ids)))


def random_x(rng: np.random.Generator, tokens: int, hidden: int) -> NDArray[np.uint16]:
    """Normal activations as bf16 [T, H]."""
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def bill(shape: Shape, tokens: int, read_bytes: int) -> dict[str, int]:
    """Bytes that measuring takes: the arena, and what calls of so many tokens need beside it.

    Those are x (drawn in fp64, then fp32 and bf16) and the output, the draw of the routing (fp64
    and an order of int64 over all experts), and the scratch of two layers (h and the row of every
    slot, in fp32 and quantised).
    """
    experts = shape.experts * shape.spec(ActFormat.MXINT8).layout.record_bytes
    a_token = 16 * (shape.hidden + shape.experts) + 8 * shape.top_k
    scratch = 2 * 8 * shape.top_k * (shape.hidden + shape.intermediate)
    return {
        "experts": max(experts, read_bytes),
        f"{tokens} tokens": tokens * (a_token + scratch),
    }


def require_room(parts: dict[str, int]) -> None:
    """Raises MachineError, with the numbers, when the parts do not fit. Sizes in bytes."""
    needed, available = sum(parts.values()), read_memory().available
    if needed > available:
        detail = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        raise MachineError(
            f"not enough memory: {format_bytes(needed)} needed ({detail}), "
            f"{format_bytes(available)} available",
            hint="measure fewer --tokens, or a smaller layer: --experts, --hidden, --intermediate",
        )


class Rig:
    """The experts of a layer in one huge-page arena.

    Args:
        shape: the layer.
        max_tokens: tokens of the largest call.
        seed: of the weights and of every call.
        read_bytes: size of the arena, at least.
        progress: told (done, all) experts while they are made.

    Raises:
        MachineError: experts and calls do not fit in memory; before anything is allocated.
        TierError: the kernel does not supply the memory.
    """

    def __init__(
        self,
        shape: Shape,
        max_tokens: int,
        seed: int,
        read_bytes: int = READ_BYTES,
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        require_room(bill(shape, max_tokens, read_bytes))
        self.shape = shape
        self.max_tokens = max_tokens
        self.rng = np.random.default_rng(seed)
        layout = shape.spec(ActFormat.MXINT8).layout
        self.expert_bytes = layout.payload_bytes
        self._record = layout.record_bytes
        self.arena = Arena(max(shape.experts * self._record, read_bytes), populate=True)
        self._fill(progress)
        self.x = random_x(self.rng, max_tokens, shape.hidden)
        self.out = np.zeros_like(self.x)

    def _fill(self, progress: Callable[[int, int], None]) -> None:
        """Random codes, plausible scales. Experts are rotations of one: as fast as any others."""
        groups = self.rng.integers(
            0, 256, (self.expert_bytes // GROUP_BYTES, GROUP_BYTES), np.uint8
        )
        codes = 4 * TILE_BYTES
        groups[:, codes:] = self.rng.integers(*SCALES, (len(groups), GROUP_BYTES - codes))
        for e in range(self.shape.experts):
            start = e * self._record
            expert = self.arena.bytes[start : start + groups.size].reshape(groups.shape)
            expert[:] = np.roll(groups, e, axis=0)
            progress(e + 1, self.shape.experts)

    def probe(self, pool: Pool) -> ReadProbe:
        """The read loop over this arena's bytes, with the pool's threads."""
        return ReadProbe(pool, self.arena.address, self.arena.bytes.size)

    def layer(self, act: ActFormat, pool: Pool, isa: str = "") -> CpuLayer:
        """The layer, planned and bound. The rig must outlive it."""
        layer = CpuLayer(self.shape.spec(act), pool, isa, self.max_tokens)
        for e in range(self.shape.experts):
            layer.bind(e, self.arena.address + e * self._record)
        return layer

    def work(self, tokens: int) -> Work:
        """A new random call."""
        return random_work(self.rng, tokens, self.shape)

    def step(self, layer: CpuLayer, work: Work) -> Callable[[], Any]:
        """The call on a layer, bf16 in and out, ready to be timed."""

        def call() -> None:
            layer.run_at(
                x=self.x.ctypes.data,
                x_type=DType.BF16,
                tokens=len(work.ids),
                ids=work.ids.ctypes.data,
                weights=work.weights.ctypes.data,
                slots=work.ids.shape[1],
                out=self.out.ctypes.data,
                out_type=DType.BF16,
            )

        return call
