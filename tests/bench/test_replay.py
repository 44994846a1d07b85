"""Replays: the cascade's own decisions, the figures that come of them, the optimum above all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moet.base.errors import UsageError
from moet.bench.record import Record
from moet.bench.replay import BEST, Options, numbered, optimum, replay, run
from moet.hybrid.trace import Call, Trace
from moet.hybrid.trace_synthetic import Synthetic, make_trace
from moet.testing.below import MemoryBelow
from moet.tiers.api import ExpertKey
from moet.tiers.cascade import Cascade
from moet.tiers.placement import Placement
from moet.tiers.policy import POLICIES

PAGE = 4096


def small(**like: Any) -> Trace:
    sizes = {"layers": 3, "experts": 24, "top_k": 3, "steps": 120, "prompt_every": 40}
    return make_trace(Synthetic(**{**sizes, "prompt_tokens": 30, **like}))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [1, 7, 30, 72])
def test_the_cascade_reads_what_its_replay_says(policy: str, slots: int) -> None:
    trace = small(streams=2)
    calls = [numbered(trace, call) for call in trace.calls]
    placement = Placement(np.repeat(np.arange(3), 24), POLICIES[policy], slots, min(4, slots))
    expected = replay(placement, calls)
    keys = [ExpertKey(layer, e) for layer in range(3) for e in range(24)]
    below = MemoryBelow(dict.fromkeys(keys, np.zeros(8, np.uint8)))
    read = []
    with Cascade(below, slots * PAGE, policy=POLICIES[policy], window=4) as cascade:
        for call in calls:
            before = len(below.log)
            with cascade.want([keys[i] for i in call.ids], bool(call.sweep.all())) as wanted:
                for _ in wanted:
                    pass
            read.append(len(below.log) - before)
    assert read == expected


def brute_force(records: int, slots: int, calls: list[list[int]]) -> int:
    """The fewest reads, over everything that could be kept after every call."""
    from itertools import combinations

    best = {frozenset[int](): 0}
    for wanted in calls:
        after: dict[frozenset[int], int] = {}
        for kept, cost in best.items():
            held = kept | set(wanted)
            now = cost + len(set(wanted) - kept)
            for size in range(min(slots, len(held)) + 1):
                for choice in map(frozenset, combinations(sorted(held), size)):
                    after[choice] = min(after.get(choice, now), now)
        best = after
    return min(best.values())


def test_nobody_beats_the_optimum_and_it_can_be_reached() -> None:
    rng = np.random.default_rng(0)
    for slots in (1, 2, 3):
        calls = [sorted(rng.choice(5, 2, replace=False).tolist()) for _ in range(9)]
        trace = Trace((0,), 5, 2, [Call(0, 1, tuple(wanted)) for wanted in calls])
        of = [numbered(trace, call) for call in trace.calls]
        assert sum(optimum(5, slots, of)) == brute_force(5, slots, calls)


def test_the_record_has_every_policy_and_adds_up() -> None:
    told: list[float] = []
    options = Options(
        trace=small(),
        source={"made": {}},
        budgets=(0.5, 0.1),
        record_bytes=1000,
        bandwidth=1e6,
        skip=0.5,
        window=2,
    )
    record = run(options, lambda what, share: told.append(share))
    assert Record.from_json(record.to_json()).rows("policy") == record.rows("policy")
    rows = record.rows("policy")
    assert [(row["budget"], row["policy"]) for row in rows] == [
        (budget, name) for budget in (0.5, 0.1) for name in (*POLICIES, BEST)
    ]
    assert told == sorted(told)
    assert told[-1] == 1
    for row in rows:
        assert 0 < row["hit_rate"] < 1
        assert row["steps"] + row["prefills"] == record.setup["steps"] - record.setup["skipped"]
        assert row["bytes_a_step"] == pytest.approx(9 * (1 - row["hit_rate"]) * 1000)
        assert row["stall_s"] == pytest.approx(row["bytes_a_step"] / 1e6)
    best = {row["budget"]: row for row in rows if row["policy"] == BEST}
    for row in rows:
        assert row["hit_rate"] <= best[row["budget"]]["hit_rate"] + 0.02, "prefills share it"


def test_everything_in_memory_is_read_once() -> None:
    trace = small(prompt_every=0)
    options = Options(
        trace=trace, source={}, policies=("lru", BEST), budgets=(1.0,), skip=0.0, window=1
    )
    used = len({(call.layer, e) for call in trace.calls for e in call.decode})
    for row in run(options).rows("policy"):
        assert row["hit_rate"] == pytest.approx(1 - used / (120 * 9))


@pytest.mark.parametrize(
    "odd",
    [
        {"policies": ("mru",)},
        {"budgets": (0.0,)},
        {"budgets": (1.5,)},
        {"record_bytes": 0},
        {"bandwidth": 0.0},
        {"skip": 1.0},
        {"window": -1},
    ],
)
def test_what_cannot_be_replayed(odd: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        Options(trace=small(), source={}, **odd)
    assert caught.value.hint
