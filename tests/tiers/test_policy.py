"""Policies: decisions of a ledger alone, and what they are worth on traces that are known."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from moet.base.errors import TierError, UsageError
from moet.tiers.placement import Placement
from moet.tiers.policy import (
    NOBODY,
    POLICIES,
    Ids,
    Ledger,
    Mask,
    Order,
    Part,
    Policy,
    admits,
    named,
    over_protected,
    rates,
    victim,
)


def ids(*values: int) -> Ids:
    return np.array(values, np.int64)


def call(placement: Placement, wanted: Ids, *, prefill: bool = False) -> int:
    """A call of a layer whose reads are there at once; returns how many were needed."""
    missing = wanted[~placement.there[wanted]]
    placement.pins[wanted] += 1
    placement.use(wanted, np.full(len(wanted), prefill))
    todo = list(map(int, missing))
    computed = [int(i) for i in wanted if placement.there[i]]
    while todo or computed:
        while todo and placement.room(todo[0], sweep=prefill):
            placement.arrived(todo[0])
            computed.append(todo.pop(0))
        assert computed, "a call always gets on"
        placement.pins[computed] -= 1
        computed = []
    return len(missing)


def check(placement: Placement) -> None:
    ledger = placement.ledger
    held = placement.there | placement.coming
    assert np.array_equal(held, ledger.part > Part.ABSENT)
    assert placement.used <= placement.slots
    assert ledger.main() <= placement.main
    assert not (placement.there & placement.coming).any()
    if placement.policy.protected:
        most = int(placement.policy.protected * placement.main)
        assert np.count_nonzero(ledger.part == Part.PROTECTED) <= most


def one_layer(name: str, experts: int, slots: int, window: int = 1) -> Placement:
    return Placement(np.zeros(experts, np.int64), POLICIES[name], slots, window)


def zipf_calls(
    rng: np.random.Generator, calls: int, experts: int, top_k: int, exponent: float = 1.0
) -> list[Ids]:
    weights = 1.0 / np.arange(1, experts + 1) ** exponent
    order = rng.permutation(experts)
    draws = np.log(rng.random((calls, experts))) / weights  # Efraimidis and Spirakis: no repeats
    return [np.sort(order[np.argsort(-row)[:top_k]]) for row in draws]


def misses(placement: Placement, trace: list[Ids]) -> int:
    return sum(call(placement, wanted) for wanted in trace)


# ---- decisions


def ledger_of(parts: list[int], worth: list[int], proven: list[bool] | None = None) -> Ledger:
    ledger = Ledger(np.zeros(len(parts), np.int64))
    ledger.part[:] = parts
    ledger.last[:] = worth
    ledger.score[:] = worth
    ledger.proven[:] = True if proven is None else proven
    return ledger


ALL_FREE: Mask = np.ones(4, np.bool_)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_victims_come_from_probation_then_by_worth_then_by_id(policy: Policy) -> None:
    assert victim(ledger_of([3, 2, 2, 1], [1, 9, 8, 0]), policy, ALL_FREE, sweep=False) == 2
    assert victim(ledger_of([3, 2, 2, 1], [1, 8, 8, 0]), policy, ALL_FREE, sweep=False) == 2
    assert victim(ledger_of([3, 3, 1, 0], [2, 5, 0, 0]), policy, ALL_FREE, sweep=False) == 0
    assert victim(ledger_of([1, 1, 0, 0], [2, 5, 0, 0]), policy, ALL_FREE, sweep=False) == NOBODY


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_leased_records_are_never_victims(policy: Policy) -> None:
    ledger = ledger_of([2, 2, 2, 2], [1, 2, 3, 4])
    free = np.array([False, False, True, True])
    assert victim(ledger, policy, free, sweep=False) == 2
    assert victim(ledger, policy, np.zeros(4, np.bool_), sweep=False) == NOBODY


def test_a_sweep_displaces_only_what_decode_has_not_used() -> None:
    ledger = ledger_of([2, 2, 2, 0], [1, 2, 3, 0], [True, False, True, False])
    assert victim(ledger, POLICIES["lfu"], ALL_FREE, sweep=True) == 1
    assert victim(ledger, POLICIES["lru"], ALL_FREE, sweep=True) == 0, "plain LRU does not resist"


def test_admission_asks_for_more_than_the_victim_by_the_hysteresis() -> None:
    policy = Policy(order=Order.FREQUENCY, admission=True, hysteresis=0.5)
    ledger = ledger_of([0, 2, 2, 2], [15, 10, 9, 20])
    assert [admits(ledger, policy, 0, loser) for loser in (1, 2, 3)] == [False, True, False]
    assert not admits(ledger, policy, 0, NOBODY)
    assert admits(ledger, POLICIES["lru"], 0, 3), "LRU lets everybody in"


def test_a_use_counts_half_after_the_half_life() -> None:
    policy = Policy(order=Order.FREQUENCY, half_life=4)
    ledger = Ledger(np.zeros(2, np.int64))
    for now in range(9):
        ledger.use(policy, ids(0 if now in {0, 4} else 1), np.array([False]))
    now = 2.0 ** (ledger.calls[0] / policy.half_life)
    assert ledger.score[0] / now == pytest.approx(0.25 + 0.5)


def test_scores_survive_ages_of_calls() -> None:
    """Scores grow as powers of two; long before float64 ends, all are scaled down."""
    policy = Policy(order=Order.FREQUENCY, half_life=0.25)
    ledger = Ledger(np.array([0, 1], np.int64))
    for _ in range(2000):
        ledger.use(policy, ids(0), np.array([False]))
        ledger.use(policy, ids(1), np.array([False]))
    assert np.isfinite(ledger.score).all()
    assert ledger.score[0] == ledger.score[1] > 0, "a scaling hits all layers alike"


def test_heat_is_worth_a_steady_state() -> None:
    """A record that is used at the recorded rate keeps its score."""
    policy = Policy(order=Order.FREQUENCY, half_life=16, prior=1.0)
    ledger = Ledger(np.zeros(3, np.int64))
    ledger.expect_heat(policy, np.array([1.0, 0.5, 0.0]))
    start = ledger.score.copy()
    for now in range(400):
        used = ids(0, 1) if now % 2 else ids(0)
        ledger.use(policy, used, np.zeros(len(used), np.bool_))
    settled = ledger.score / 2.0 ** (ledger.calls[0] / policy.half_life)
    assert settled[0] == pytest.approx(start[0], rel=1e-3)
    assert settled[1] == pytest.approx(start[1], rel=0.05)
    assert settled[2] == start[2] == 0


def test_rates_of_recorded_heat() -> None:
    counts = np.array([[40, 20, 20, 0], [0, 0, 0, 0]])
    assert rates(counts, 2).tolist() == [[1.0, 0.5, 0.5, 0.0], [0.0] * 4]


def test_protected_records_beyond_the_share_go_back_to_probation() -> None:
    policy = Policy(order=Order.RECENCY, protected=0.5)
    ledger = ledger_of([3, 3, 3, 2], [5, 4, 6, 9])
    assert over_protected(ledger, policy, 4) == [1]
    assert over_protected(ledger, policy, 2) == [1, 0]
    assert over_protected(ledger, policy, 6) == []


@pytest.mark.parametrize(
    "wrong", [{"half_life": 0}, {"prior": 2}, {"protected": -1}, {"hysteresis": float("nan")}]
)
def test_policies_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError) as caught:
        Policy(order=Order.RECENCY, **wrong)  # type: ignore[arg-type]
    assert caught.value.hint
    with pytest.raises(UsageError, match="no policy 'mru'"):
        named("mru")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_trace_keeps_the_books_and_repeats_itself(data: st.DataObject) -> None:
    """Slots, window, parts and pins add up at any time (``check``), every call gets on, and the
    same trace makes the same decisions."""
    policy = POLICIES[data.draw(st.sampled_from(sorted(POLICIES)))]
    experts, layers = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    slots = data.draw(st.integers(1, 12))
    window = data.draw(st.integers(0, slots))
    some = st.sets(st.integers(0, experts - 1), min_size=1)
    calls = data.draw(
        st.lists(st.tuples(st.integers(0, layers - 1), some, st.booleans()), max_size=25)
    )
    ends = []
    for _ in range(2):
        placement = Placement(np.repeat(np.arange(layers), experts), policy, slots, window)
        for layer, wanted, prefill in calls:
            call(placement, layer * experts + np.array(sorted(wanted)), prefill=prefill)
            check(placement)
        ends.append(placement)
    assert ends[0].pins.sum() == 0
    assert np.array_equal(ends[0].ledger.part, ends[1].ledger.part)
    assert np.array_equal(ends[0].ledger.score, ends[1].ledger.score)


# ---- traces


@pytest.mark.parametrize("name", ["slru", "lfu", "heat"])
def test_a_prefill_sweep_leaves_the_working_set_of_decode(name: str) -> None:
    """99 % is asked for; with what decode has used never displaced, it is all of it."""
    rng = np.random.default_rng(1)
    placement = one_layer(name, 256, 64, 4)
    for wanted in zipf_calls(rng, 300, 256, 6):
        call(placement, wanted)
    working = np.flatnonzero(placement.there & (placement.ledger.part > Part.WINDOW))
    assert len(working) == 60
    for _ in range(3):
        call(placement, np.arange(256), prefill=True)
    assert placement.there[working].all()


def test_plain_lru_loses_it_to_the_same_sweep() -> None:
    rng = np.random.default_rng(1)
    placement = one_layer("lru", 256, 64, 4)
    trace = zipf_calls(rng, 300, 256, 6)
    misses(placement, trace)
    working = np.flatnonzero(placement.there)
    call(placement, np.arange(256), prefill=True)
    assert placement.there[working].mean() < 0.4


def test_lru_is_lru_window_and_all() -> None:
    """With nothing but recency the parts do not show: what stays is what was used last."""
    rng = np.random.default_rng(2)
    for slots, window in ((8, 1), (8, 4), (1, 1)):
        placement = one_layer("lru", 40, slots, window)
        recent: list[int] = []
        for i in rng.integers(0, 40, 500).tolist():
            assert bool(placement.there[i]) == (i in recent[-slots:])
            call(placement, ids(i))
            recent = [r for r in recent if r != i] + [i]


def test_frequency_beats_recency_on_zipf() -> None:
    rng = np.random.default_rng(3)
    trace = zipf_calls(rng, 800, 128, 6)
    counted = {name: misses(one_layer(name, 128, 32, 2), trace) for name in ("lru", "slru", "lfu")}
    assert counted["lfu"] < 0.9 * counted["lru"]
    assert counted["slru"] < counted["lru"]


def test_frequency_gets_on_in_a_loop_where_recency_gets_nowhere() -> None:
    """More layers than fit, one after the other: LRU drops each record just before it is needed."""
    layers = np.repeat(np.arange(10), 4)
    loop = [np.arange(4) + 4 * (n % 10) for n in range(200)]
    counted = {}
    for name in ("lru", "lfu"):
        counted[name] = misses(Placement(layers, POLICIES[name], 20, 2), loop)
    assert counted["lru"] == 800
    assert counted["lfu"] < 500


def test_decay_follows_a_drift_that_plain_counts_do_not() -> None:
    rng = np.random.default_rng(4)
    before, after = zipf_calls(rng, 1000, 128, 6), zipf_calls(rng, 500, 128, 6)
    counted = []
    for half_life in (64, 1e9):
        policy = Policy(order=Order.FREQUENCY, admission=True, half_life=half_life)
        placement = Placement(np.zeros(128, np.int64), policy, 32, 2)
        misses(placement, before)
        counted.append(misses(placement, after))
    assert counted[0] < 0.8 * counted[1]


def test_recorded_heat_saves_the_warm_up() -> None:
    rng = np.random.default_rng(5)
    trace = zipf_calls(rng, 600, 128, 6)
    counts = np.bincount(np.concatenate(trace), minlength=128)[None]
    cold, warm = one_layer("lfu", 128, 32, 2), one_layer("heat", 128, 32, 2)
    warm.ledger.expect_heat(warm.policy, rates(counts, 6)[0])
    assert misses(warm, trace[:200]) < misses(cold, trace[:200])


def test_hysteresis_spares_swaps_between_equals() -> None:
    """Uniform routing: whoever is in is as good as whoever is out, so swapping buys nothing."""
    rng = np.random.default_rng(6)
    trace = zipf_calls(rng, 600, 64, 4, exponent=0.0)
    swaps = []
    for hysteresis in (0.0, 0.5):
        policy = Policy(order=Order.FREQUENCY, admission=True, hysteresis=hysteresis)
        placement = Placement(np.zeros(64, np.int64), policy, 16, 1)
        changed = 0
        for wanted in trace:
            before = placement.ledger.part >= Part.PROBATION
            call(placement, wanted)
            changed += int((before & (placement.ledger.part < Part.PROBATION)).sum())
        swaps.append(changed)
    assert swaps[1] < 0.5 * swaps[0]


# ---- placement


def test_guesses_displace_no_guesses_and_leave_a_slot() -> None:
    placement = one_layer("lfu", 32, 8, 3)
    for wanted in (ids(0, 1, 2, 3, 4), ids(0, 1, 2, 3, 4)):
        call(placement, wanted)
    assert [placement.room_for_guess(i) is not None for i in (10, 11, 12)] == [True, True, False]
    assert placement.hinted.sum() == 2
    placement.arrived(10)
    placement.arrived(11)
    assert placement.room_for_guess(12) is None
    assert call(placement, ids(10, 20)) == 1, "the guess was right, and somebody else had room"
    assert not placement.hinted[10]
    assert placement.there[11], "still a guess"


def test_shrinking_drops_the_least_worth_and_no_lease() -> None:
    placement = one_layer("lfu", 16, 8, 2)
    for n in range(6):
        call(placement, np.arange(n, 6))
    placement.pins[0] = 1  # the least used, but leased
    placement.resize(3, 1)
    gone = []
    while (i := placement.surplus()) != NOBODY:
        gone.append(i)
    assert gone == [1, 2, 3]
    assert placement.there[[0, 4, 5]].all()
    placement.resize(1, 1)
    while placement.surplus() != NOBODY:
        pass
    assert np.flatnonzero(placement.there).tolist() == [0], "more is leased than fits: it stays"


def test_everything_fits_needs_no_window() -> None:
    placement = one_layer("lfu", 8, 9, 4)
    assert (placement.window, placement.main) == (0, 9)
    placement.resize(7, 0)
    assert (placement.window, placement.main) == (1, 6), "otherwise a call could get stuck"
    with pytest.raises(TierError):
        placement.resize(0, 0)
