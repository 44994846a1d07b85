"""Faults of the hybrid step, made on purpose on a card: each a clear error in time, or no harm.

    stopped    a worker of the CPU stops in the middle of a layer: an error within a second
    slow       it stops for less than that: waited for, and the output is right
    request    the card's request is overwritten: an error
    answer     the CPU's answer is overwritten: an error

After an error the tokens that needed the CPU are NaN, the others are right, and after a reset the
same captured step is right again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import KernelError, StepError
from moet.formats.mxint import ActFormat
from moet.hybrid.card import CardExperts
from moet.hybrid.mailbox import STALL_SECONDS, Variant
from moet.hybrid.synthetic import SyntheticExperts
from moet.kernels.cpu import CpuLayer, release_workers, stall_worker
from moet.kernels.cuda.layer import Step
from moet.kernels.spec import DType, LayerSpec
from moet.verify.cases import random_x
from moet.verify.hybrid import Room

KINDS: Final = ("stopped", "slow", "request", "answer")
SOON_S: Final = 1.0
SLOW_MS: Final = 300

_SPEC: Final = LayerSpec(hidden=512, intermediate=512, experts=8, top_k=2, act=ActFormat.MXINT8)
_IDS: Final = np.array([[0, 1], [2, 0], [1, -1], [5, 7]], np.int32)
"""Experts 0 and 1 are on the card: tokens 0 and 2 need no CPU, tokens 1 and 3 do."""
_NEEDS_CPU: Final = np.array([False, True, False, True])
_NAN: Final = 0x7FFF
_BACK_S: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class FaultReport:
    """What one fault has done.

    Attributes:
        variant: how the card waited.
        fault: of `KINDS`.
        seconds: from the step's launch until its end was seen.
        said: the error; empty: none.
        wrong: what is not as it must be; empty: all is well.
    """

    variant: str
    fault: str
    seconds: float
    said: str
    wrong: str


def examine(
    room: Room,
    variants: Sequence[Variant],
    kinds: Sequence[str] | None = None,
    progress: Callable[[FaultReport], None] = lambda report: None,
) -> list[FaultReport]:
    """Makes each fault with each way to wait.

    Args:
        room: card and CPU.
        variants: ways to wait.
        kinds: of `KINDS`; None: all.
        progress: is told of each.
    """
    reports = []
    for variant in variants:
        with _opened(room, variant) as bench:
            for kind in KINDS if kinds is None else kinds:
                reports.append(bench.try_fault(kind))
                progress(reports[-1])
    return reports


@contextmanager
def _opened(room: Room, variant: Variant) -> Iterator[_Bench]:
    bench = _Bench(room, variant)
    try:
        yield bench
    finally:
        release_workers(room.pool)
        bench.close()


class _Bench:
    """One small layer, two of its experts on the card, its step captured."""

    def __init__(self, room: Room, variant: Variant) -> None:
        self.room, self.variant = room, variant
        self.synthetic = SyntheticExperts({0: _SPEC})
        self.experts = CardExperts(
            room.card, room.link, room.memory, room.pool, {0: _SPEC},
            capacity_bytes=2 * _SPEC.layout.record_bytes, max_tokens=len(_IDS),
            variant=variant, stall_seconds=STALL_SECONDS,
        )  # fmt: skip
        self.experts.bind(self.synthetic.borrow())
        self.mailbox = self.experts.mailbox
        alone = CpuLayer(_SPEC, room.pool, max_tokens=len(_IDS))
        self.synthetic.bind(0, alone)
        rng = np.random.default_rng(0)
        x = random_x(rng, len(_IDS), _SPEC.hidden, DType.BF16)
        weights = rng.standard_normal(_IDS.shape).astype(np.float32)
        self.want = alone.run(x, _IDS, weights, DType.BF16)
        self.held: list[int] = []
        self.step = Step(
            x=self._upload(x), x_type=DType.BF16, tokens=len(_IDS), ids=self._upload(_IDS),
            weights=self._upload(weights), out=self._upload(x), out_type=DType.BF16,
        )  # fmt: skip
        self.stream = room.card.stream()
        self.experts.place({0: (0, 1)}, self.stream)
        with self.mailbox.recording() as posts:
            self.graph = room.card.capture(self.stream, self._enqueue)
        self.posts = posts[0]

    def _enqueue(self) -> None:
        self.experts.layers[0].run(self.step, self.stream)

    def _upload(self, data: NDArray[Any]) -> int:
        self.held.append(self.room.card.allocate(data.nbytes))
        self.room.card.upload(self.held[-1], data)
        return self.held[-1]

    def _replay(self) -> tuple[NDArray[np.uint16], str, float]:
        """(output, error, seconds) of a step."""
        got = np.empty_like(self.want)
        self.room.card.fill(self.step.out, 0x5A, got.nbytes)
        start = time.monotonic()
        self.mailbox.announce(self.posts)
        self.graph.replay()
        self.room.card.download(got, self.step.out)
        seconds = time.monotonic() - start
        try:
            self.mailbox.check()
        except StepError as error:
            return got, str(error), seconds
        return got, "", seconds

    def try_fault(self, kind: str) -> FaultReport:
        """Makes a fault, and tries whether the step is right again after it."""
        self._make(kind)
        got, said, seconds = self._replay()
        report = FaultReport(
            variant=str(self.variant), fault=kind, seconds=seconds, said=said,
            wrong=self._wrong(kind, got, said, seconds),
        )  # fmt: skip
        release_workers(self.room.pool)
        if said and (still := self._recover()):
            return replace(report, wrong=f"{report.wrong}; {still}".lstrip("; "))
        return report

    def _make(self, kind: str) -> None:
        if kind in {"stopped", "slow"}:
            stall_worker(self.room.pool, -1, SLOW_MS if kind == "slow" else -1)
        else:
            self.mailbox.core.exam_corrupt({"request": 1, "answer": 2}[kind])

    def _wrong(self, kind: str, got: NDArray[np.uint16], said: str, seconds: float) -> str:
        if kind == "slow":
            early = seconds < SLOW_MS / 1e3
            right = not said and np.array_equal(got, self.want)
            return "" if right and not early else "a slow worker was not waited for"
        if not said:
            return "no error was raised"
        if not (got[_NEEDS_CPU] == _NAN).all():
            return "tokens whose rows did not come are not NaN"
        if not np.array_equal(got[~_NEEDS_CPU], self.want[~_NEEDS_CPU]):
            return "tokens that needed no CPU are not right"
        if kind == "stopped" and seconds > SOON_S:
            return f"the error came after {seconds:.2f} s"
        return ""

    def _recover(self) -> str:
        end = time.monotonic() + _BACK_S
        while True:
            try:
                self.mailbox.reset()
                break
            except KernelError:  # the worker is on its way back
                if time.monotonic() > end:
                    return "the mailbox cannot be reset"
                time.sleep(0.01)
        got, said, _ = self._replay()
        right = not said and np.array_equal(got, self.want)
        return "" if right else f"not right after a reset: {said or 'other bits'}"

    def close(self) -> None:
        self.graph.close()
        for address in self.held:
            self.room.card.free(address)
        self.experts.close()
        self.synthetic.close()
