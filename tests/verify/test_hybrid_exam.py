"""The exams of the hybrid step, on the stand-in for a card: they pass there, and see faults."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from tests.kernels.cuda_host.emulator import HostGpu, HostLink, build_library, instant_card

from moet.base.errors import TierError
from moet.formats.mxint import ActFormat
from moet.hybrid import synthetic
from moet.hybrid.mailbox import Variant
from moet.hybrid.synthetic import SyntheticExperts
from moet.kernels.cpu import Pool
from moet.kernels.spec import LayerSpec
from moet.tiers.card import CardTier
from moet.verify import faults, hybrid
from moet.verify.hybrid import HybridCase, Room
from moet.verify.uploads import Uploads

SPEC = LayerSpec(hidden=64, intermediate=32, experts=6, top_k=2, act=ActFormat.MXINT8)
INT16 = LayerSpec(hidden=32, intermediate=32, experts=4, top_k=2, act=ActFormat.MXINT16)
CASES = (
    HybridCase(name="int16", spec=INT16, layers=2, every_variant=True),
    HybridCase(name="int8", spec=SPEC, layers=2),
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_library(tmp_path_factory.mktemp("hybrid_exam"))


@pytest.fixture
def room(library: ctypes.CDLL) -> Iterator[Room]:
    card, memory = HostGpu(library), instant_card()
    yield Room(card, HostLink(card), memory, Pool(2), stall_seconds=30.0)
    assert card.held == {}
    assert memory.left == (0, 0, 0)
    memory.close()


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "TOKENS", (2, 1, 3))
    monkeypatch.setattr(hybrid, "LEAST_RANDOM_SPLITS", 3)
    monkeypatch.setattr(hybrid, "SPLITS_A_SET", 3)


@pytest.mark.usefixtures("brief")
def test_the_exam_compares_every_split_eager_and_replayed(room: Room) -> None:
    seen: list[int] = []
    report = hybrid.examine(
        room,
        (Variant.POLL, Variant.MEMOP),
        outputs=1,
        cases=CASES,
        progress=lambda case: seen.append(case.splits),
    )
    names = [(c.name, c.variant) for c in report.cases]
    assert names == [("int16", "poll"), ("int16", "memop"), ("int8", "poll")]
    assert seen == 3 * [1, 2, 3, 4, 5]
    for case in report.cases:
        assert case.splits == 5
        assert case.replayed * 2 == case.outputs > 0
        assert case.steps == 5 * 3 * 2
        assert case.calls == 2 * 3
        assert case.uploads > 0
        assert case.direct
        assert case.isa
    assert report.passed
    assert report.as_dict()["outputs"] == sum(c.outputs for c in report.cases)


@pytest.mark.usefixtures("brief")
def test_a_wrong_byte_is_seen_and_named(room: Room) -> None:
    room.card.broken = True  # type: ignore[attr-defined]
    report = hybrid.examine(room, (Variant.POLL,), outputs=1, cases=CASES[1:])
    (case,) = report.cases
    assert not report.passed
    assert case.differing == case.steps, "one byte of each download"
    assert "layer 1, out[1, 63] is 0x" in case.example
    assert case.example.startswith("split 1, eager, 2 tokens")


def test_an_exam_without_enough_splits_has_not_passed() -> None:
    case = hybrid.CaseReport(name="a", variant="poll", splits=51, uploads=1)
    assert not hybrid.HybridReport(card="x", cases=[case]).passed
    case.splits = 52
    assert hybrid.HybridReport(card="x", cases=[case]).passed
    assert not hybrid.HybridReport(card="x").passed


@pytest.mark.parametrize("variant", Variant)
def test_every_fault_is_an_error_in_time_or_does_no_harm(room: Room, variant: Variant) -> None:
    told = faults.examine(room, (variant,))
    assert [r.fault for r in told] == list(faults.KINDS)
    said = {r.fault: r.said for r in told}
    assert "made no progress" in said["stopped"]
    assert said["slow"] == ""
    assert "not whole" in said["request"]
    assert "gave up" in said["answer"]
    # How soon the error of a stop comes is a matter of a quiet machine: not judged here.
    assert {r.wrong for r in told if r.fault != "stopped"} == {""}


# ---- what they are made of


def test_synthetic_experts_are_distinct_and_repeatable() -> None:
    spec = LayerSpec(hidden=256, intermediate=128, experts=10, top_k=1, act=ActFormat.MXINT8)
    one, two = (SyntheticExperts({3: spec, 4: spec}, seed=5) for _ in range(2))
    records = [bytes(lease.view()) for lease in one.leases.values()]
    assert len(set(records)) == 20
    assert records == [bytes(lease.view()) for lease in two.leases.values()]
    scales = np.frombuffer(records[7], np.uint8)[: spec.layout.gate_bias].reshape(-1, 1088)
    low, high = synthetic.SCALES
    assert ((scales[:, 1024:] >= low) & (scales[:, 1024:] < high)).all()
    for experts in (one, two):
        experts.close()


def test_experts_that_fit_nowhere_are_refused_at_once() -> None:
    huge = LayerSpec(hidden=8192, intermediate=8192, experts=65536, top_k=1, act=SPEC.act)
    with pytest.raises(TierError) as caught:
        SyntheticExperts({0: huge})
    assert "--experts" in caught.value.hint


@pytest.mark.parametrize("error", [TierError, ZeroDivisionError])
def test_an_upload_that_fails_is_told_at_the_end(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = instant_card()
    experts = SyntheticExperts({0: SPEC})
    tier = CardTier(memory, 4096, record_bytes=4096)  # too small for any of them
    if error is not TierError:

        def broken(leases: object) -> int:
            raise error

        monkeypatch.setattr(tier, "upload", broken)
    uploads = Uploads(tier, experts.leases, 0)
    uploads._thread.join(20)
    with pytest.raises(error):
        uploads.stop()
    for owned in (tier, experts, memory):
        owned.close()
