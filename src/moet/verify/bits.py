"""`moet verify bits`: the CPU kernels against the reference, bit for bit, on random layers.

Every output of every vocabulary that this machine has is compared directly with the reference's
(`kernels.reference`, numpy): no kernel stands in for it. Layers are random in everything that the
numerics know: shapes, formats, gates, limits, biases, types, empty slots, duplicate ids, scale
bytes up to the extremes, NaN and infinities. Threads, batches and steps are random too; none may
matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import UsageError
from moet.formats.gate import GateKind
from moet.formats.mxint import ActFormat
from moet.kernels import reference
from moet.kernels.cpu import Pool, choose_isa, isa_available
from moet.kernels.rounding import round_output
from moet.kernels.spec import DType, LayerSpec
from moet.verify.cases import (
    PLAIN_SCALES,
    WILD_SCALES,
    LayerCase,
    random_routing,
    random_x,
    widened,
)

DEEP_K: Final = 2048
"""A deep layer's dots are all at least so long."""

WAYS_OF_THE_BEST: Final = 3
"""Ways (threads, batch, step) in which the best vocabulary runs each case; the others run one."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a case is run; none of it may change a bit.

    Attributes:
        threads: of the pool.
        batch: tokens a call.
        step: tokens that a layer was planned for; longer calls are cut.
    """

    threads: int
    batch: int
    step: int


@dataclass(kw_only=True)
class BitsReport:
    """What was compared, and what differed.

    Attributes:
        seed: gives the same cases again.
        cases: layers tried.
        outputs: numbers that the reference computed.
        deep: of these, those of layers whose dots all have K >= 2048.
        nan: of these, those that are NaN, as the contract wants them to be.
        compared: vocabulary -> outputs compared, all its ways counted.
        differing: vocabulary -> outputs that are not the reference's bits.
        first: the first difference, with what reproduces it; empty without one.
        seconds: how long it took.
    """

    seed: int
    cases: int = 0
    outputs: int = 0
    deep: int = 0
    nan: int = 0
    compared: dict[str, int] = field(default_factory=dict)
    differing: dict[str, int] = field(default_factory=dict)
    first: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Something was compared with every vocabulary, and nothing differs."""
        return all(self.compared.values()) and not any(self.differing.values())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"passed": self.passed}


@dataclass(frozen=True)
class Exam:
    """One case: a layer, a call of it, and the reference's answer."""

    case: LayerCase
    x: NDArray[Any]
    ids: NDArray[np.int32]
    weights: NDArray[np.float32]
    out_type: DType
    expected: NDArray[Any]

    @classmethod
    def random(cls, rng: np.random.Generator, *, deep: bool) -> Exam:
        """A random layer and call, answered by the reference."""
        spec = random_spec(rng, deep=deep)
        wild = rng.random() < 0.3
        case = LayerCase.random(rng, spec, WILD_SCALES if wild else PLAIN_SCALES)
        tokens = int(rng.integers(1, 65)) if rng.random() < 0.2 else (64 if deep else 256)
        x = random_x(rng, tokens, spec.hidden, pick(rng, DType), wild)
        ids, weights = random_routing(rng, tokens, spec)
        out_type = pick(rng, DType)
        out = reference.moe_layer(spec, widened(x), ids, weights, case.experts)
        return cls(case, x, ids, weights, out_type, round_output(out, out_type))

    def differences(self, isa: str, pool: Pool, way: Way) -> NDArray[np.intp]:
        """Flat indices of the outputs that are not the reference's bits."""
        layer = self.case.layer(pool, isa, way.step)
        parts = [
            layer.run(self.x[t], self.ids[t], self.weights[t], self.out_type)
            for t in slices(len(self.x), way.batch)
        ]
        return np.flatnonzero(np.concatenate(parts).view(self.expected.dtype) != self.expected)


def run(
    outputs: int,
    seed: int = 0,
    progress: Progress = lambda what, share: None,
    isa: str = "",
) -> BitsReport:
    """Compares until the reference has computed so many outputs, at least half of them deep.

    The reference is what takes the time: about 200,000 deep and 2 million other outputs a second
    and core.

    Args:
        outputs: numbers to compare, at least.
        seed: of the cases.
        progress: told what is done and the share of it.
        isa: the only instruction set to examine; empty: all that this machine has.

    Raises:
        UsageError: `outputs` or `seed` is out of range.
        KernelError: this machine does not have `isa`.
    """
    if outputs < 1:
        raise UsageError(f"{outputs} outputs", hint="1 or more, for example 10000000")
    if seed < 0:
        raise UsageError(f"seed {seed}", hint="0 or more")
    rng = np.random.default_rng(seed)
    names = (choose_isa(isa),) if isa else isa_available()
    pools = {threads: Pool(threads) for threads in (1, 2, 3)}
    report = BitsReport(
        seed=seed, compared=dict.fromkeys(names, 0), differing=dict.fromkeys(names, 0)
    )
    start = time.monotonic()
    while report.outputs < outputs or 2 * report.deep < outputs:
        exam = Exam.random(rng, deep=2 * report.deep < report.outputs)
        _count(report, exam)
        for name, way in _ways(rng, names):
            _compare(report, exam, name, pools[way.threads], way)
        progress("comparing", min(1.0, report.outputs / outputs))
    report.seconds = time.monotonic() - start
    return report


def random_spec(rng: np.random.Generator, *, deep: bool) -> LayerSpec:
    """A layer with dots of K >= 2048 everywhere, or a small one of any shape."""
    experts = int(rng.integers(1, 3 if deep else 9))
    hidden, intermediate = (
        int(size)
        for size in (
            (rng.choice([2048, 2880, 4096, 7168]), rng.choice([2048, 2048, 2304]))
            if deep
            else 32 * rng.integers(1, 33, 2)
        )
    )
    spec = LayerSpec(
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=1 if deep else int(rng.integers(1, min(experts, 4) + 1)),
        act=pick(rng, ActFormat),
        gate=pick(rng, GateKind),
        biased=bool(rng.random() < 0.3),
    )
    limit, scale = rng.choice([0.5, 7.0, 10.0]), rng.choice([0.3, 1.5])
    if rng.random() < 0.6:
        spec = replace(spec, limit=float(limit))
    return replace(spec, output_scale=float(scale)) if rng.random() < 0.3 else spec


def pick(rng: np.random.Generator, kinds: Any) -> Any:
    """A random member of an enumeration."""
    members = list(kinds)
    return members[int(rng.integers(len(members)))]


def slices(tokens: int, batch: int) -> Iterator[slice]:
    """Calls of at most `batch` tokens each."""
    return (slice(first, first + batch) for first in range(0, tokens, batch))


def _ways(rng: np.random.Generator, names: tuple[str, ...]) -> Iterator[tuple[str, Way]]:
    for isa in names[:1] * (WAYS_OF_THE_BEST - 1) + names:
        threads, batch, step = rng.integers(1, (4, 65, 65))
        yield isa, Way(threads=int(threads), batch=int(batch), step=int(step))


def _count(report: BitsReport, exam: Exam) -> None:
    spec = exam.case.spec
    report.cases += 1
    report.outputs += exam.expected.size
    report.deep += exam.expected.size if min(spec.hidden, spec.intermediate) >= DEEP_K else 0
    nan = reference_nan(exam.expected, exam.out_type)
    report.nan += int(np.count_nonzero(nan))


def reference_nan(out: NDArray[Any], out_type: DType) -> NDArray[np.bool_]:
    """Which stored outputs (unsigned integers) are the canonical NaN of their type."""
    nan: NDArray[np.bool_] = out == (0x7FFFFFFF if out_type is DType.F32 else 0x7FFF)
    return nan


def _compare(report: BitsReport, exam: Exam, isa: str, pool: Pool, way: Way) -> None:
    wrong = exam.differences(isa, pool, way)
    report.compared[isa] += exam.expected.size
    report.differing[isa] += wrong.size
    if wrong.size and not report.first:
        token, column = divmod(int(wrong[0]), exam.case.spec.hidden)
        report.first = (
            f"seed {report.seed}, case {report.cases}, {isa}, token {token}, column {column}: "
            f"{exam.case.spec}, {way}, stored as {exam.out_type.name}"
        )
