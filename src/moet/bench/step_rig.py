"""Synthetic hybrid layers and their calls: what `moet bench step` runs and times.

Beside each measured layer stands a tiny one of the same width, whose experts have next to nothing
to compute: what the mailbox costs by itself is measured with it, on the same mailbox.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moet.bench.rig import random_x
from moet.hybrid.card import CardExperts
from moet.hybrid.mailbox import STALL_SECONDS, Variant
from moet.hybrid.synthetic import SyntheticExperts
from moet.kernels.cpu import CpuLayer, Pool
from moet.kernels.cuda.gpu import Graph
from moet.kernels.cuda.layer import CudaLayer, Elsewhere, Step, workspace_of
from moet.kernels.cuda.opened import OpenedCard
from moet.kernels.cuda.plan import plan_layer
from moet.kernels.spec import DType, LayerSpec

ROUND_TRIPS: Final = 32
"""Posts of a graph that measures the mailbox alone: so many that its launch does not count."""

_TINY: Final = 32


def tiny(spec: LayerSpec) -> LayerSpec:
    """A layer of the same tokens, rows and formats with the least to compute."""
    return replace(spec, intermediate=_TINY, experts=spec.top_k)


def resident_count(spec: LayerSpec, percent: int) -> int:
    """Experts of a layer that are on the card where a share of the routings shall be there."""
    share = percent / 100
    most_slots = -(-spec.top_k * percent // 100)  # of one token
    fewest, most = most_slots, spec.experts - (spec.top_k - spec.top_k * percent // 100)
    return max(fewest, min(most, round(share * spec.experts)))


def draw_ids(
    rng: np.random.Generator, spec: LayerSpec, tokens: int, percent: int
) -> NDArray[np.int32]:
    """Random experts, distinct in a token, int32 [T, K]. The stated share of all slots is of
    experts on the card, which are the first `resident_count`; the rest goes to the others."""
    resident, slots = resident_count(spec, percent), spec.top_k
    whole, part = divmod(slots * percent, 100)
    extra = rng.random() + np.cumsum(np.full(tokens, part / 100))
    on_card = whole + np.diff(np.floor(extra), prepend=np.floor(extra[0] - part / 100)).astype(int)
    ids = np.empty((tokens, slots), np.int32)
    for row, count in zip(ids, on_card, strict=True):
        hot = rng.permutation(resident)[:count]
        cold = resident + rng.permutation(spec.experts - resident)[: slots - count]
        row[:] = rng.permutation(np.concatenate([hot, cold]))
    return ids


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Calls of all layers, new experts in each.

    Attributes:
        ids: int32 [N, layers, T, K].
        asked: the same with -1 where the expert is on the card: what the CPU is asked for.
        cpu_experts: distinct experts of a layer's request to the CPU, on average.
        card_experts: distinct experts of a layer that are on the card, on average.
        on_card: share of the routings whose experts are on the card.
    """

    ids: NDArray[np.int32]
    asked: NDArray[np.int32]
    cpu_experts: float
    card_experts: float
    on_card: float


def draw_calls(
    rng: np.random.Generator, spec: LayerSpec, *, count: int, layers: int, tokens: int, percent: int
) -> Calls:
    """Random calls; see `draw_ids`."""
    resident = resident_count(spec, percent)
    ids = np.stack(
        [[draw_ids(rng, spec, tokens, percent) for _ in range(layers)] for _ in range(count)]
    )
    flat = ids.reshape(count * layers, -1)
    distinct = [np.unique(row) for row in flat]
    return Calls(
        ids=ids,
        asked=np.where(ids < resident, -1, ids).astype(np.int32),
        cpu_experts=sum(int((row >= resident).sum()) for row in distinct) / len(flat),
        card_experts=sum(int((row < resident).sum()) for row in distinct) / len(flat),
        on_card=float((flat < resident).mean()),
    )


class StepRig:
    """The layers 0..L-1 on a card and its host, and as many tiny ones behind them.

    Args:
        card: the card.
        pool: the CPU's workers.
        experts: of the layers 0..2L-1.
        capacity_bytes: of the card, for experts.
        max_tokens: of a step.
        variant: how the card waits.
        seed: of activations.
        stall_seconds: of the mailbox.
        isa: the CPU kernels.
    """

    def __init__(
        self,
        card: OpenedCard,
        pool: Pool,
        experts: SyntheticExperts,
        *,
        capacity_bytes: int,
        max_tokens: int,
        variant: Variant,
        seed: int = 0,
        stall_seconds: float = STALL_SECONDS,
        isa: str = "",
    ) -> None:
        gpu = card.gpu
        self.gpu, self.link, self.pool, self.max_tokens = gpu, card.link, pool, max_tokens
        self.layers = len(experts.specs) // 2
        self.spec = experts.specs[0]
        self.stream = gpu.stream()
        self.experts = CardExperts(
            gpu, card.link, card.memory, pool, experts.specs, capacity_bytes=capacity_bytes,
            max_tokens=max_tokens, variant=variant, stall_seconds=stall_seconds, isa=isa,
        )  # fmt: skip
        self.experts.bind(experts.borrow())
        self.mailbox = self.experts.mailbox
        self._held: list[int] = []
        self._pinned: list[int] = []
        self.x = random_x(np.random.default_rng(seed), max_tokens, self.spec.hidden)
        self._x = self._upload(self.x)
        self._weights = self._upload(np.full((max_tokens, self.spec.top_k), 0.25, np.float32))
        self._out = self._allocate(self.x.nbytes)
        self._ids = self._allocate(4 * self.layers * max_tokens * self.spec.top_k)
        self._cards = {i: self._card_layer(i, s) for i, s in experts.specs.items()}
        self._alone = [CpuLayer(self.spec, pool, isa, max_tokens) for _ in range(self.layers)]
        for index, layer in enumerate(self._alone):
            experts.bind(index, layer)
        self._rows = np.zeros(4 * max_tokens * self.spec.top_k * self.spec.hidden, np.uint8)

    def _allocate(self, nbytes: int) -> int:
        self._held.append(self.gpu.allocate(nbytes))
        return self._held[-1]

    def _upload(self, data: NDArray[Any]) -> int:
        address = self._allocate(data.nbytes)
        self.gpu.upload(address, data)
        return address

    def _card_layer(self, index: int, spec: LayerSpec) -> CudaLayer:
        nbytes = workspace_of(spec, plan_layer(spec, self.gpu.card, self.max_tokens)).nbytes
        workspace = self._allocate(nbytes)
        self.gpu.fill(workspace, 0, nbytes)
        return CudaLayer(
            spec, self.gpu.card, self.gpu, table=self.experts.tables[index].address,
            workspace=workspace, max_tokens=self.max_tokens,
        )  # fmt: skip

    def place(self, percent: int) -> int:
        """Puts the experts on the card that `draw_ids` takes for resident; how many a layer."""
        count = resident_count(self.spec, percent)
        self.experts.place({i: tuple(range(count)) for i in range(self.layers)}, self.stream)
        return count

    def _step(self, tokens: int, ids: int) -> Step:
        return Step(
            x=self._x, x_type=DType.BF16, tokens=tokens, ids=ids, weights=self._weights,
            out=self._out, out_type=DType.BF16,
        )  # fmt: skip

    def steps(self, tokens: int) -> list[Step]:
        """A step a layer, on the ids that `load` writes."""
        nbytes = 4 * tokens * self.spec.top_k
        return [self._step(tokens, self._ids + i * nbytes) for i in range(self.layers)]

    # ---- graphs

    def hybrid_graph(self, tokens: int) -> tuple[Graph, int]:
        """All layers, card and CPU; and the posts to announce."""

        def work() -> None:
            for index, step in enumerate(self.steps(tokens)):
                self.experts.layers[index].run(step, self.stream)

        return self._recorded(work)

    def card_graph(self, tokens: int) -> Graph:
        """The same layers' kernels on the card alone: the CPU's rows are taken to be there."""

        def work() -> None:
            for index, step in enumerate(self.steps(tokens)):
                there = replace(step, elsewhere=Elsewhere.IN_ROWS)
                self._cards[index].run(there, self.stream)

        return self.gpu.capture(self.stream, work)

    def mail_graph(self, tokens: int, asked: int) -> tuple[Graph, int]:
        """Posts, waits and combines alone, `ROUND_TRIPS` of them: the CPU is asked for so many
        slots of each token, of experts with next to nothing to compute."""
        ids = np.full((tokens, self.spec.top_k), -1, np.int32)
        ids[:, :asked] = np.arange(asked)
        step = self._step(tokens, self._upload(ids))

        def work() -> None:
            for trip in range(ROUND_TRIPS):
                self._mail_alone(self.layers + trip % self.layers, step)

        return self._recorded(work)

    def _mail_alone(self, index: int, step: Step) -> None:
        card, table = self._cards[index], self.experts.tables[index]
        self.mailbox.post(
            step, self.stream, index=index, table=table.address, spec=card.spec,
            slots=card.spec.top_k,
        )  # fmt: skip
        self.mailbox.wait(self.stream, index=index, early=False)
        mail = self.mailbox.addresses
        there = replace(step, elsewhere=Elsewhere.ON_HOST, host_rows=mail.rows, failed=mail.failed)
        card.run_combine(there, self.stream)

    def _recorded(self, work: Callable[[], None]) -> tuple[Graph, int]:
        with self.mailbox.recording() as posts:
            graph = self.gpu.capture(self.stream, work)
        return graph, posts[0]

    # ---- calls

    def pin(self, calls: Calls) -> Callable[[int], None]:
        """Copies the calls' ids into pinned memory; what enqueues a call's ids for the layers."""
        nbytes, one = calls.ids.nbytes, calls.ids[0].nbytes
        address = self.link.pinned(nbytes)
        self._pinned.append(address)
        ctypes.memmove(address, calls.ids.ctypes.data, nbytes)

        def load(number: int) -> None:
            source = address + number % len(calls.ids) * one
            self.link.upload_async(self._ids, source, one, self.stream)

        return load

    def answer_alone(self, calls: Calls, number: int) -> None:
        """The CPU's share of a call, layer after layer, without a card."""
        for layer, ids in zip(self._alone, calls.asked[number % len(calls.asked)], strict=True):
            if (ids >= 0).any():
                layer.run_rows_at(
                    x=self.x.ctypes.data, x_type=DType.BF16, tokens=len(ids),
                    ids=ids.ctypes.data, slots=ids.shape[1], rows=self._rows.ctypes.data,
                )  # fmt: skip

    def release_calls(self) -> None:
        """Gives the pinned ids back; no step may be in flight."""
        while self._pinned:
            self.link.free_pinned(self._pinned.pop())

    def close(self) -> None:
        """Gives everything back."""
        self.release_calls()
        self.experts.close()
        for address in self._held:
            self.gpu.free(address)
