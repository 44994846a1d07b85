"""Times of calls, and which of them to believe on a machine that others use too."""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One timed call.

    Attributes:
        seconds: how long it took.
        quiet: no thread of this process was preempted meanwhile.
    """

    seconds: float
    quiet: bool


def timed(call: Callable[[], object]) -> Sample:
    """Times one call."""
    before = _preemptions()
    start = time.perf_counter_ns()
    call()
    seconds = (time.perf_counter_ns() - start) * 1e-9
    return Sample(seconds, _preemptions() == before)


def _preemptions() -> int:
    """Involuntary context switches of all threads of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def median(values: Sequence[float]) -> float:
    """The middle value (the upper one of two); NaN for none."""
    return sorted(values)[len(values) // 2] if values else math.nan


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many per cent do not exceed; NaN for none."""
    rank = math.ceil(len(values) * percent / 100)
    return sorted(values)[max(rank, 1) - 1] if values else math.nan


def believable(samples: Sequence[Sample], wanted: int) -> list[Sample]:
    """The quiet samples where there are enough of them, otherwise all."""
    quiet = [s for s in samples if s.quiet]
    return quiet if len(quiet) >= wanted else list(samples)


@contextmanager
def pinned(cpu: int) -> Iterator[None]:
    """Pins the calling thread to one CPU, as an engine does with its worker."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
