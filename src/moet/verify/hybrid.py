"""Exam of the hybrid step: any split of the experts gives the CPU's bytes, eager and replayed.

For every split, none and all among them, the same calls run through all layers on card and CPU, and
every output is compared on raw bytes with `CpuLayer.run`, which equals the reference (`moet verify
bits`). Meanwhile another thread uploads experts that the split does not have into free slots, and
evicts them again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import TierError
from moet.formats.mxint import ActFormat
from moet.hybrid.card import CardExperts, HybridLink
from moet.hybrid.mailbox import STALL_SECONDS, Variant
from moet.hybrid.probe import ProbeCard, Replayable
from moet.hybrid.split import Split
from moet.hybrid.synthetic import SyntheticExperts
from moet.kernels.cpu import CpuLayer, Pool
from moet.kernels.cuda.layer import Step
from moet.kernels.spec import DType, LayerSpec
from moet.tiers.memory import CardMemory
from moet.verify.cases import random_routing, random_x
from moet.verify.uploads import SPARE_SLOTS, Uploads

LEAST_RANDOM_SPLITS: Final = 50
SPLITS_A_SET: Final = 16
"""Splits that a set of calls is used for."""

TOKENS: Final = (64, 1, 2, 5, 8, 17, 33, 64)
"""Of the calls of a set; the last but one is drawn anew."""


@dataclass(frozen=True, kw_only=True)
class HybridCase:
    """Layers of the exam.

    Attributes:
        name: for the report.
        spec: of every layer.
        layers: of a step.
        weight: its part of the outputs.
        every_variant: each way to wait that works, not only the chosen one.
    """

    name: str
    spec: LayerSpec
    layers: int = 4
    weight: float = 1.0
    every_variant: bool = False


def _spec(hidden: int, intermediate: int, experts: int, top_k: int, **more: Any) -> LayerSpec:
    more.setdefault("act", ActFormat.MXINT8)
    return LayerSpec(hidden=hidden, intermediate=intermediate, experts=experts, top_k=top_k, **more)


CASES: Final = (
    HybridCase(
        name="qwen3 width, MXINT16",
        spec=_spec(2048, 768, 128, 8, act=ActFormat.MXINT16),
        weight=0.05,
        every_variant=True,
    ),
    HybridCase(name="V4-Flash width", spec=_spec(4096, 2048, 256, 6, limit=10.0), weight=0.35),
    HybridCase(name="V4.1-Flash width", spec=_spec(5120, 2304, 384, 6, limit=10.0), weight=0.5),
)
"""Real widths and counts of experts, rows of both types."""


@dataclass(kw_only=True)
class CaseReport:
    """What one case has shown so far.

    Attributes:
        name: of the case.
        variant: how the card waited.
        isa: of the CPU.
        splits: placed, none and all included.
        resident: experts on the card, over all splits.
        calls: drawn, each for all layers.
        steps: eager ones and replays.
        outputs: values compared.
        replayed: of them, those of replays.
        differing: of them, not the CPU's bytes.
        nans: of them, NaN (of poisoned tokens).
        uploads: experts that were uploaded beside the steps and evicted again.
        direct: uploads took the experts straight from the host's memory.
        seconds: how long it took.
        example: the first difference, in words.
    """

    name: str
    variant: str
    isa: str = ""
    splits: int = 0
    resident: int = 0
    calls: int = 0
    steps: int = 0
    outputs: int = 0
    replayed: int = 0
    differing: int = 0
    nans: int = 0
    uploads: int = 0
    direct: bool = True
    seconds: float = 0.0
    example: str = ""


@dataclass(kw_only=True)
class HybridReport:
    """The exam's result; `passed` says whether every byte agreed."""

    card: str
    cases: list[CaseReport] = field(default_factory=list)

    @property
    def outputs(self) -> int:
        """Values compared in all."""
        return sum(c.outputs for c in self.cases)

    @property
    def differing(self) -> int:
        """Values that differ in all."""
        return sum(c.differing for c in self.cases)

    @property
    def passed(self) -> bool:
        """Every case was run on enough splits, uploads went on beside it, and no value differs."""
        enough = all(c.splits >= 2 + LEAST_RANDOM_SPLITS and c.uploads for c in self.cases)
        return bool(self.cases) and enough and self.differing == 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        sums = {"outputs": self.outputs, "differing": self.differing, "passed": self.passed}
        return asdict(self) | sums


@dataclass(frozen=True)
class Room:
    """Where the exam is held: a card, its host link, its memory for uploads, and the CPU."""

    card: ProbeCard
    link: HybridLink
    memory: CardMemory
    pool: Pool
    stall_seconds: float = STALL_SECONDS


class _Call:
    """One call of all layers: on the card's buffers, captured, and what it must give."""

    def __init__(self, desk: _Desk, tokens: int) -> None:
        rng, spec = desk.rng, desk.case.spec
        self.card, self.tokens = desk.room.card, tokens
        self.x_type, self.out_type = (DType(int(rng.integers(3))) for _ in range(2))
        x = random_x(rng, tokens, spec.hidden, self.x_type)
        if tokens > 1 and rng.integers(2):
            _poison(x, int(rng.integers(tokens)))
        routings = [random_routing(rng, tokens, spec) for _ in desk.alone]
        self.want = np.stack(
            [
                layer.run(x, ids, weights, self.out_type)
                for layer, (ids, weights) in zip(desk.alone, routings, strict=True)
            ]
        )
        self.got = np.empty_like(self.want)
        self.held: list[int] = []
        out, device_x = self._allocate(self.want.nbytes), self._upload(x)
        self.out = out
        self.steps = [
            Step(
                x=device_x, x_type=self.x_type, tokens=tokens, ids=self._upload(ids),
                weights=self._upload(weights), out=out + i * self.want[0].nbytes,
                out_type=self.out_type,
            )
            for i, (ids, weights) in enumerate(routings)
        ]  # fmt: skip
        self.graph, self.posts = desk.capture(self)

    def _allocate(self, nbytes: int) -> int:
        self.held.append(self.card.allocate(nbytes))
        return self.held[-1]

    def _upload(self, data: NDArray[Any]) -> int:
        address = self._allocate(data.nbytes)
        self.card.upload(address, data)
        return address

    def close(self) -> None:
        self.graph.close()
        for address in self.held:
            self.card.free(address)


def _poison(x: NDArray[Any], token: int) -> None:
    x[token, 0] = 0x7FC0 if x.dtype == np.uint16 else np.nan


class _Desk:
    """One case with one way to wait, on card and CPU."""

    def __init__(self, room: Room, case: HybridCase, variant: Variant, seed: int) -> None:
        self.room, self.case = room, case
        self.rng = np.random.default_rng(seed)
        self.report = CaseReport(name=case.name, variant=str(variant))
        specs = dict.fromkeys(range(case.layers), case.spec)
        self.synthetic = SyntheticExperts(specs, seed=seed)
        record = case.spec.layout.record_bytes
        self.experts = CardExperts(
            room.card, room.link, room.memory, room.pool, specs,
            capacity_bytes=(case.layers * case.spec.experts + SPARE_SLOTS) * record,
            max_tokens=max(TOKENS), variant=variant, stall_seconds=room.stall_seconds,
        )  # fmt: skip
        self.experts.bind(self.synthetic.borrow())
        self._register()
        self.alone = [CpuLayer(case.spec, room.pool, max_tokens=max(TOKENS)) for _ in specs]
        for index, layer in enumerate(self.alone):
            self.synthetic.bind(index, layer)
        self.stream = room.card.stream()
        self.uploads = Uploads(self.experts.tier, self.synthetic.leases, seed)
        self.calls: list[_Call] = []

    def _register(self) -> None:
        """Uploads straight from the experts' memory; where the machine refuses, by way of staging
        buffers, and the report says so."""
        tier = self.synthetic.tier
        try:
            self.experts.tier.register_host(tier.address_of(0), tier.capacity)
        except TierError:
            self.report.direct = False

    def capture(self, call: _Call) -> tuple[Replayable, int]:
        with self.uploads.held(), self.experts.mailbox.recording() as posts:
            graph = self.room.card.capture(self.stream, lambda: self.enqueue(call))
        return graph, posts[0]

    def enqueue(self, call: _Call) -> None:
        for index, step in enumerate(call.steps):
            self.experts.layers[index].run(step, self.stream)

    def draw(self) -> None:
        """A new set of calls."""
        self.close_calls()
        fresh = int(self.rng.integers(1, max(TOKENS) + 1))
        tokens = (*TOKENS[:-2], fresh, TOKENS[-1])
        self.calls = [_Call(self, t) for t in tokens]
        self.report.calls += len(self.calls)
        self.report.isa = self.alone[0].ran_isa or ""

    def splits(self) -> Iterator[Split]:
        """None, all, then random ones of every density, for ever."""
        layers, every = range(self.case.layers), range(self.case.spec.experts)
        yield dict.fromkeys(layers, ())
        yield dict.fromkeys(layers, tuple(every))
        while True:
            densities = self.rng.random(len(layers))
            yield {
                i: tuple(int(e) for e in np.flatnonzero(self.rng.random(len(every)) < density))
                for i, density in zip(layers, densities, strict=True)
            }

    def sit(self, split: Split) -> None:
        """All calls on one split."""
        with self.uploads.held() as taken:
            self.experts.place(split, self.stream)
            taken(split)
        self.report.splits += 1
        self.report.resident += self.experts.resident
        for call in self.calls:
            self._run(call, "eager", lambda call=call: self.enqueue(call))  # type: ignore[misc]
            self._run(call, "replayed", call.graph.replay)

    def _run(self, call: _Call, how: str, work: Callable[[], None]) -> None:
        card, mailbox = self.room.card, self.experts.mailbox
        card.fill(call.out, 0x5A, call.want.nbytes)
        mailbox.announce(call.posts)
        work()
        card.download(call.got, call.out)
        mailbox.check()
        self.report.steps += 1
        self.report.outputs += call.want.size
        self.report.replayed += call.want.size if how == "replayed" else 0
        self._compare(call, how)

    def _compare(self, call: _Call, how: str) -> None:
        report = self.report
        word = np.uint32 if call.want.dtype == np.float32 else np.uint16
        got, want = call.got.view(word), call.want.view(word)
        report.nans += int((want[:, :, 0] == np.iinfo(word).max >> 1).sum()) * want.shape[2]
        if np.array_equal(got, want):
            return
        differs = got != want
        report.differing += int(differs.sum())
        if not report.example:
            layer, token, column = (int(i) for i in np.argwhere(differs)[0])
            report.example = (
                f"split {report.splits}, {how}, {call.tokens} tokens: layer {layer}, "
                f"out[{token}, {column}] is {int(got[layer, token, column]):#x}, "
                f"the CPU has {int(want[layer, token, column]):#x}"
            )

    def close_calls(self) -> None:
        while self.calls:
            self.calls.pop().close()

    def close(self) -> None:
        try:
            self.report.uploads = self.uploads.stop()
        finally:
            self.close_calls()
            self.experts.close()
            self.synthetic.close()


def examine(
    room: Room,
    chosen: Sequence[Variant],
    *,
    outputs: int = 10**9,
    cases: Sequence[HybridCase] = CASES,
    seed: int = 0,
    progress: Callable[[CaseReport], None] = lambda report: None,
) -> HybridReport:
    """Compares until so many outputs have been seen, and at least 50 random splits a case.

    Args:
        room: card and CPU.
        chosen: ways to wait; the first one is used throughout, the others on the cases that take
            every one.
        outputs: values to compare, over all cases.
        cases: the layers.
        seed: gives the same exam again.
        progress: is told of each split of a case.

    Raises:
        TierError: the experts do not fit into the host's memory or the card's.
        StepError: a step failed.
    """
    jobs = [
        (case, variant)
        for case in cases
        for variant in (chosen if case.every_variant else chosen[:1])
    ]
    total = sum(case.weight for case, _ in jobs)
    report = HybridReport(card=room.card.card.name)
    for number, (case, variant) in enumerate(jobs):
        wanted = outputs * case.weight / total
        desk = _Desk(room, case, variant, seed + number)
        report.cases.append(_sit_all(desk, wanted, progress))
    return report


def _sit_all(desk: _Desk, outputs: float, progress: Callable[[CaseReport], None]) -> CaseReport:
    start, mine = time.monotonic(), desk.report
    try:
        for split in desk.splits():
            if mine.splits >= 2 + LEAST_RANDOM_SPLITS and mine.outputs >= outputs:
                break
            if mine.splits % SPLITS_A_SET == 0:
                desk.draw()
            desk.sit(split)
            mine.seconds = time.monotonic() - start
            progress(mine)
    finally:
        desk.close()
    return mine
