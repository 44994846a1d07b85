"""Exam of a GPU's kernels: whole layers against the CPU kernels, on raw bytes, eager and replayed.

The CPU kernels equal the reference (`moet verify bits`), so a card that passes here computes the
bits of docs/numerics.md. Records are random bytes, padding included: no kernel may look at it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from moet.formats.gate import GateKind
from moet.formats.mxint import ActFormat
from moet.formats.tiling import RECORD_ALIGNMENT
from moet.kernels.cpu import CpuLayer, Pool
from moet.kernels.cuda.layer import CudaLayer, Launcher, Step, workspace_of
from moet.kernels.cuda.plan import Card, Tuning, plan_layer
from moet.kernels.cuda.synthetic import random_records
from moet.kernels.spec import DType, LayerSpec
from moet.verify.cases import PLAIN_SCALES, WILD_SCALES, random_routing, random_x

MOST_TOKENS: Final = 64

_NUMPY: Final[dict[DType, type[np.generic]]] = {
    DType.F32: np.float32,
    DType.BF16: np.uint16,
    DType.F16: np.float16,
}


class Replayable(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Enqueues it."""

    def close(self) -> None:
        """Gives it back."""


class ExamCard(Launcher, Protocol):
    """What the exam needs of a GPU: `moet.kernels.cuda.gpu.Gpu` has it."""

    card: Card

    def allocate(self, nbytes: int) -> int: ...  # noqa: D102
    def free(self, address: int) -> None: ...  # noqa: D102
    def fill(self, address: int, byte: int, nbytes: int) -> None: ...  # noqa: D102
    def upload(self, address: int, data: NDArray[Any]) -> None: ...  # noqa: D102
    def download(self, data: NDArray[Any], address: int) -> None: ...  # noqa: D102
    def stream(self) -> int: ...  # noqa: D102
    def capture(self, stream: int, work: Callable[[], None]) -> Replayable: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class ExamCase:
    """A layer of the exam.

    Attributes:
        name: for the report.
        spec: the layer.
        wild: any scale byte, activations with NaN, infinities and extreme exponents.
        tuning: None = the card's own plan.
    """

    name: str
    spec: LayerSpec
    wild: bool = False
    tuning: Tuning | None = None


def _spec(hidden: int, intermediate: int, experts: int, top_k: int, **more: Any) -> LayerSpec:
    more.setdefault("act", ActFormat.MXINT8)
    return LayerSpec(hidden=hidden, intermediate=intermediate, experts=experts, top_k=top_k, **more)


_OSS: Final[dict[str, Any]] = {"gate": GateKind.GPT_OSS, "limit": 7.0, "biased": True}
_INT16: Final = ActFormat.MXINT16

CASES: Final = (
    ExamCase(name="V4-Flash width", spec=_spec(4096, 2048, 32, 6, limit=10.0)),
    ExamCase(name="V4.1-Flash width", spec=_spec(5120, 2304, 24, 6, limit=10.0)),
    ExamCase(name="gpt-oss width", spec=_spec(2880, 2880, 16, 4, act=_INT16, **_OSS)),
    ExamCase(name="qwen3 width", spec=_spec(2048, 768, 48, 8, act=_INT16)),
    ExamCase(name="rows, MXINT8", spec=_spec(4096, 416, 64, 1), wild=True),
    ExamCase(name="rows, MXINT16", spec=_spec(5120, 160, 64, 1, act=_INT16), wild=True),
    ExamCase(
        name="gelu, biases, scale",
        spec=_spec(
            7168, 288, 300, 2, gate=GateKind.GELU_TANH, biased=True, output_scale=2.5, limit=3.0
        ),
    ),
    ExamCase(name="many segments", spec=_spec(7168, 1568, 8, 8, act=_INT16), wild=True),
    ExamCase(name="one block", spec=_spec(32, 32, 600, 8), wild=True),
    ExamCase(
        name="one block of threads, deep rings",
        spec=_spec(2880, 544, 8, 4, **_OSS),
        tuning=Tuning(warps=1, deepest=6, overlap=False),
    ),
)
"""Widths of real models, ragged ones, every gate and format, many and few experts."""


@dataclass
class CaseReport:
    """What one case has shown so far.

    Attributes:
        outputs: values compared, of eager steps and of replays.
        differing: of them, not the same bytes as the CPU's.
        nans: of them, NaN (of poisoned tokens).
        calls: random calls.
        example: the first difference, in words.
    """

    name: str
    outputs: int = 0
    differing: int = 0
    nans: int = 0
    calls: int = 0
    example: str = ""


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """The exam's result; `passed` says whether every byte agreed."""

    card: Card
    isa: str
    seconds: float
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
        """Every case was run and no value differs."""
        return self.differing == 0 and all(c.calls for c in self.cases)


class _Room:
    """One case on the card and on the CPU, with buffers for calls of up to 64 tokens."""

    def __init__(self, card: ExamCard, pool: Pool, case: ExamCase, seed: int) -> None:
        self.card, self.case = card, case
        self.rng = np.random.default_rng(seed)
        spec = case.spec
        scales = WILD_SCALES if case.wild else PLAIN_SCALES
        self.records = random_records(self.rng, spec, scales)
        self.cpu = CpuLayer(spec, pool, max_tokens=MOST_TOKENS)
        for e, record in enumerate(self.records):
            self.cpu.bind(e, record.ctypes.data)
        self.held: list[int] = []
        self.stream = card.stream()
        self.layer = self._plan(spec)
        self.x = self._allocate(4 * MOST_TOKENS * spec.hidden)
        self.ids = self._allocate(4 * MOST_TOKENS * spec.top_k)
        self.weights = self._allocate(4 * MOST_TOKENS * spec.top_k)
        self.out = self._allocate(4 * MOST_TOKENS * spec.hidden)

    def _allocate(self, nbytes: int) -> int:
        self.held.append(self.card.allocate(nbytes))
        return self.held[-1]

    def _plan(self, spec: LayerSpec) -> CudaLayer:
        size = spec.layout.record_bytes
        records = self._allocate(self.records.nbytes)
        if records % RECORD_ALIGNMENT % 64:
            raise AssertionError("the driver aligns allocations to 256 bytes")
        self.card.upload(records, self.records)
        table = self._allocate(8 * spec.experts)
        self.card.upload(table, records + size * np.arange(spec.experts, dtype=np.uint64))
        plan = plan_layer(spec, self.card.card, MOST_TOKENS, self.case.tuning)
        nbytes = workspace_of(spec, plan).nbytes
        workspace = self._allocate(nbytes)
        self.card.fill(workspace, 0xFF, nbytes)
        return CudaLayer(
            spec,
            self.card.card,
            self.card,
            table=table,
            workspace=workspace,
            max_tokens=MOST_TOKENS,
            tuning=self.case.tuning,
        )

    def call(self, report: CaseReport) -> None:
        """One random call: eager, replayed, and on the CPU."""
        rng, spec = self.rng, self.case.spec
        tokens = int(rng.integers(1, MOST_TOKENS + 1) if rng.integers(4) else rng.integers(1, 9))
        x_type, out_type = (DType(int(rng.integers(3))) for _ in range(2))
        x = random_x(rng, tokens, spec.hidden, x_type, self.case.wild)
        ids, weights = random_routing(rng, tokens, spec)
        want = self.cpu.run(x, ids, weights, out_type)
        for address, array in ((self.x, x), (self.ids, ids), (self.weights, weights)):
            self.card.upload(address, array)
        step = Step(
            x=self.x,
            x_type=x_type,
            tokens=tokens,
            ids=self.ids,
            weights=self.weights,
            out=self.out,
            out_type=out_type,
        )
        report.calls += 1
        for how, run in self._ways(step):
            self.card.fill(self.out, 0x5A, want.nbytes)
            run()
            got = np.empty_like(want)
            self.card.download(got, self.out)
            _compare(report, f"{how}, {tokens} tokens", got, want)

    def _ways(self, step: Step) -> Iterator[tuple[str, Callable[[], None]]]:
        def eager() -> None:
            self.layer.run(step, self.stream)

        yield "eager", eager
        graph = self.card.capture(self.stream, eager)
        yield "replayed", graph.replay
        graph.close()

    def close(self) -> None:
        for address in self.held:
            self.card.free(address)


def _compare(report: CaseReport, how: str, got: NDArray[Any], want: NDArray[Any]) -> None:
    word = np.uint32 if want.dtype == np.float32 else np.uint16
    differs = got.view(word) != want.view(word)
    report.outputs += want.size
    report.differing += int(differs.sum())
    report.nans += int((want.view(word) == np.iinfo(word).max >> 1).sum())
    if differs.any() and not report.example:
        token, column = (int(i) for i in np.argwhere(differs)[0])
        report.example = (
            f"{how}: out[{token}, {column}] is {int(got.view(word)[token, column]):#x}, "
            f"the CPU has {int(want.view(word)[token, column]):#x}; "
            f"{int(differs.any(axis=1).sum())} tokens differ"
        )


def examine(
    card: ExamCard,
    pool: Pool,
    *,
    outputs: int = 10**7,
    cases: Sequence[ExamCase] = CASES,
    seed: int = 0,
    seconds: float = float("inf"),
    progress: Callable[[CaseReport], None] | None = None,
) -> GpuReport:
    """Compares random calls until so many outputs have been seen, an equal share a case.

    Args:
        card: the GPU.
        pool: threads of the CPU side.
        outputs: values to compare, over all cases.
        cases: the layers.
        seed: gives the same exam again.
        seconds: stop early, but not before each case has had one call.
        progress: is told of each finished case.
    """
    start = time.monotonic()
    report = GpuReport(card=card.card, isa="", seconds=0.0)
    isa = ""
    for index, case in enumerate(cases):
        room = _Room(card, pool, case, seed + index)
        mine = CaseReport(case.name)
        report.cases.append(mine)
        until = start + seconds * (index + 1) / len(cases)
        try:
            while not mine.calls or (
                mine.outputs * len(cases) < outputs and time.monotonic() < until
            ):
                room.call(mine)
            isa = room.cpu.ran_isa or ""
        finally:
            room.close()
        if progress is not None:
            progress(mine)
    return GpuReport(card=card.card, isa=isa, seconds=time.monotonic() - start, cases=report.cases)
