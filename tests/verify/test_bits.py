"""`moet verify bits`: it compares what it says, finds a flipped bit, and finds none here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moet.base.errors import UsageError
from moet.formats.mxint import ActFormat
from moet.kernels.cpu import CpuLayer, isa_available
from moet.verify import bits
from moet.verify.bits import BitsReport

BEST, *OTHERS = isa_available()


def check(report: BitsReport, outputs: int) -> None:
    assert report.first == ""
    assert report.passed
    assert report.outputs >= outputs
    assert 2 * report.deep >= outputs
    assert report.compared == {
        BEST: bits.WAYS_OF_THE_BEST * report.outputs,
        **dict.fromkeys(OTHERS, report.outputs),
    }
    assert report.differing == dict.fromkeys((BEST, *OTHERS), 0)


def test_kernels_equal_the_reference() -> None:
    shares: list[float] = []
    report = bits.run(300_000, seed=11, progress=lambda what, share: shares.append(share))
    check(report, 300_000)
    assert 0 < report.nan < report.outputs  # poisoned tokens beside clean ones
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert report.as_dict()["passed"] is True


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_a_hundred_million_outputs_equal_the_reference() -> None:
    check(bits.run(10**8, seed=1), 10**8)


def test_one_flipped_bit_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = CpuLayer.run

    def flipped(self: CpuLayer, *arguments: Any) -> Any:
        out = honest(self, *arguments)
        if self.isa == BEST:
            out.reshape(-1).view(np.uint8)[0] ^= 1
        return out

    monkeypatch.setattr(CpuLayer, "run", flipped)
    report = bits.run(1, seed=3)
    assert not report.passed
    assert report.differing[BEST] >= 1
    assert all(report.differing[isa] == 0 for isa in OTHERS)
    assert f"case 1, {BEST}, token 0, column 0" in report.first


def test_a_seed_gives_the_same_cases() -> None:
    first, again, other = (
        bits.Exam.random(np.random.default_rng(s), deep=False) for s in (5, 5, 6)
    )
    assert first.case.spec == again.case.spec != other.case.spec
    for name in ("x", "ids", "weights", "expected"):
        assert getattr(first, name).tobytes() == getattr(again, name).tobytes()


def test_cases_cover_what_the_numerics_know() -> None:
    rng = np.random.default_rng(0)
    deep = [bits.random_spec(rng, deep=True) for _ in range(60)]
    small = [bits.random_spec(rng, deep=False) for _ in range(200)]
    assert min(min(s.hidden, s.intermediate) for s in deep) >= bits.DEEP_K
    assert {s.act for s in small} == {s.act for s in deep} == set(ActFormat)
    for name in ("gate", "biased", "limit", "output_scale", "top_k"):
        assert len({getattr(s, name) for s in small}) > 1, name


def test_nothing_compared_is_not_a_pass() -> None:
    assert not BitsReport(seed=0, compared={"portable": 0}, differing={"portable": 0}).passed
    with pytest.raises(UsageError, match="0 outputs"):
        bits.run(0)
