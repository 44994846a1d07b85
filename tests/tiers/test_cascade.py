"""RAM over disks: what a call gets, what it waits for, what fails, what stays."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.tiers.disk_records import write_disk

from moet.base.errors import MoetError, TierError
from moet.testing.below import Finisher, MemoryBelow
from moet.testing.tiers import PAGE, memory_at, pattern
from moet.tiers.api import ExpertKey, Lease
from moet.tiers.cascade import Cascade
from moet.tiers.nvme import NvmeTier
from moet.tiers.policy import POLICIES, Part

Records = dict[ExpertKey, NDArray[np.uint8]]


def some_records(experts: int = 6, layers: int = 2, nbytes: int = 100) -> Records:
    keys = [ExpertKey(layer, e) for layer in range(layers) for e in range(experts)]
    return {key: pattern(key, nbytes) for key in keys}


def keys_of(*experts: int, layer: int = 0) -> list[ExpertKey]:
    return [ExpertKey(layer, e) for e in experts]


@contextmanager
def cascade(
    slots: int, below: MemoryBelow | None = None, **options: Any
) -> Iterator[tuple[Cascade, MemoryBelow]]:
    below = below or MemoryBelow(some_records())
    made = Cascade(below, slots * PAGE, **options)
    yield made, below
    made.close()
    assert below.registered == {}, "memory is unregistered before it goes"


def right(below: MemoryBelow, lease: Lease) -> bool:
    return bool(np.array_equal(memory_at(lease), below.records[lease.key]))


def get(
    made: Cascade, below: MemoryBelow, keys: Iterable[ExpertKey], prefill: bool = False
) -> list[ExpertKey]:
    """Goes through a call; every byte is looked at; returns what came, in its order."""
    came, leases = [], made.stats().leases
    with made.want(keys, prefill) as call:
        for group in call:
            assert all(right(below, lease) for lease in group)
            came += [lease.key for lease in group]
    assert made.stats().leases == leases, "all given back"
    return came


def test_what_is_absent_is_read_once_and_then_there() -> None:
    with cascade(8) as (made, below):
        assert sorted(get(made, below, keys_of(1, 3))) == keys_of(1, 3)
        assert sorted(get(made, below, keys_of(3, 4))) == keys_of(3, 4)
        assert [key for key, _ in below.log] == keys_of(1, 3, 4)
        stats = made.stats()
        assert (stats.calls, stats.hits, stats.misses, stats.reads) == (2, 1, 3, 3)
        assert (stats.read_bytes, stats.hit_bytes, stats.hit_rate) == (300, 100, 0.25)


def test_hits_come_first_and_are_leased_while_the_rest_is_read() -> None:
    below = MemoryBelow(some_records(), held=True)
    with cascade(8, below) as (made, _), made.want(keys_of(0)) as first:
        below.finish()
        assert len(next(iter(first))) == 1
        call = made.want(keys_of(1, 0, 2))
        assert below.flying == keys_of(1, 2), "begun at once, in the order that was given"
        groups = iter(call)
        group = next(groups)
        assert [lease.key for lease in group] == keys_of(0)
        below.finish(*keys_of(2))
        assert [lease.key for lease in next(groups)] == keys_of(2)
        below.finish()
        assert [lease.key for lease in next(groups)] == keys_of(1)
        assert next(groups, None) is None
        with pytest.raises(TierError, match="released"):
            _ = group[0].address


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_smaller_than_a_call_still_gets_on(slots: int, policy: str) -> None:
    below = MemoryBelow(some_records(experts=12), held=True)
    with cascade(slots, below, policy=POLICIES[policy]) as (made, _), Finisher(below):
        for n in range(6):
            assert sorted(get(made, below, keys_of(*range(12)), prefill=n == 3)) == keys_of(
                *range(12)
            )
        stats = made.stats()
        assert stats.resident <= slots
        assert stats.arena == slots * PAGE


def test_two_calls_share_one_read() -> None:
    below = MemoryBelow(some_records(), held=True)
    with cascade(8, below) as (made, _):
        with made.want(keys_of(0)) as one, made.want(keys_of(0, 1)) as other:
            assert below.flying == keys_of(0, 1)
            below.finish()
            came = [[lease.key for group in call for lease in group] for call in (one, other)]
        assert came == [keys_of(0), keys_of(0, 1)]
        assert (made.stats().joined, made.stats().reads) == (1, 2)


def test_a_leased_record_is_never_evicted() -> None:
    with cascade(3, window=1, policy=POLICIES["lru"]) as (made, below):
        held = made.acquire(ExpertKey(0, 0))
        for n in range(4):
            get(made, below, keys_of(1, 2, 3, 4, 5, layer=n % 2))
        assert right(below, held)
        assert ExpertKey(0, 0) in made.resident()
        held.release()


def test_slots_that_others_lease_for_ever_are_an_error() -> None:
    clock = iter(range(0, 10**6, 50))
    with cascade(1, clock=lambda: next(clock), patience_s=100) as (made, below):
        held = made.acquire(ExpertKey(0, 0))
        with made.want(keys_of(1)) as call, pytest.raises(TierError, match="leased for") as caught:
            list(call)
        assert caught.value.hint
        held.release()
        assert get(made, below, keys_of(1)) == keys_of(1)


def test_leases_of_others_in_the_window_make_the_main_part_give() -> None:
    """Everything that is free is in the main part: a call gets a place there rather than none."""
    with cascade(3, window=1) as (made, below):
        for _ in range(3):
            get(made, below, keys_of(0, 1))
        held = made.acquire(ExpertKey(0, 5))
        assert made.resident()[held.key] is Part.WINDOW
        assert get(made, below, keys_of(4)) == keys_of(4)
        held.release()


def test_prefill_leaves_what_decode_uses() -> None:
    with cascade(5, MemoryBelow(some_records(experts=12)), window=1) as (made, below):
        for _ in range(2):
            get(made, below, keys_of(2, 4, 6, 8))
        get(made, below, keys_of(*range(12)), prefill=True)
        assert set(keys_of(2, 4, 6, 8)) <= made.resident().keys()


def test_mixed_calls_say_which_tokens_ask() -> None:
    with cascade(3, MemoryBelow(some_records(experts=12)), window=1) as (made, below):
        prefill = keys_of(*range(2, 12))
        for _ in range(4):
            with made.want(keys_of(*range(12)), prefill) as call:
                assert sum(right(below, lease) for group in call for lease in group) == 12
        assert set(keys_of(0, 1)) <= made.resident().keys()


# ---- failures


def test_a_record_that_cannot_be_read_is_named_and_the_others_come() -> None:
    bad = {ExpertKey(0, 2)}
    now = [0.0]
    below = MemoryBelow(some_records(), lambda key: key in bad)
    with cascade(8, below, clock=lambda: now[0], remember_s=30) as (made, _):
        with made.want(keys_of(1, 2, 3)) as call:
            came = [lease.key for group in call for lease in group]
        assert came == keys_of(1, 3)
        assert [*call.failed] == keys_of(2)
        assert "expert 2 of layer 0" in str(call.failed[ExpertKey(0, 2)])
        assert made.failed().keys() == bad
        reads = len(below.log)
        with made.want(keys_of(2)) as again:
            assert list(again) == []
        assert again.failed, "told at once, without asking the disk again"
        assert len(below.log) == reads
        now[0] = 31
        bad.clear()
        assert get(made, below, keys_of(2)) == keys_of(2)
        assert made.failed() == {}
        assert made.stats().failures == 1


def test_forgiven_failures_are_tried_at_once() -> None:
    bad = {ExpertKey(0, 2)}
    with cascade(8, MemoryBelow(some_records(), lambda key: key in bad)) as (made, below):
        with pytest.raises(TierError, match="expert 2 of layer 0") as caught:
            made.acquire(ExpertKey(0, 2))
        assert caught.value.hint
        bad.clear()
        made.forgive()
        assert get(made, below, keys_of(2)) == keys_of(2)


def test_a_read_that_fails_after_a_call_began_is_told_to_all_that_wait() -> None:
    below = MemoryBelow(some_records(), lambda key: True, held=True)
    with cascade(4, below, remember_s=0) as (made, _):
        with made.want(keys_of(0)) as one, made.want(keys_of(0)) as other:
            below.finish()
            assert list(one) == list(other) == []
            assert one.failed.keys() == other.failed.keys() == {ExpertKey(0, 0)}
        with made.want(keys_of(0)):
            assert below.flying == keys_of(0), "the next call tries again"
            below.finish()


def test_what_below_refuses_is_a_failure_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    with cascade(4) as (made, below):

        def refuse(*_: object, **__: object) -> None:
            raise TierError("the device is gone", hint="restart")

        with monkeypatch.context() as patched:
            patched.setattr(below, "read_many", refuse)
            with made.want(keys_of(0, 1)) as call:
                assert list(call) == []
        assert [str(error) for error in call.failed.values()] == ["the device is gone"] * 2
        made.forgive()
        assert get(made, below, keys_of(0, 1)) == keys_of(0, 1)


def test_a_fault_of_ours_is_raised_and_leaves_no_waiter(monkeypatch: pytest.MonkeyPatch) -> None:
    with cascade(4) as (made, below):

        def broken(*_: object, **__: object) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patched:
            patched.setattr(below, "read_many", broken)
            with pytest.raises(ZeroDivisionError):
                made.want(keys_of(0))
        assert isinstance(made.failed()[ExpertKey(0, 0)], MoetError)


def test_a_place_that_an_interrupted_read_may_write_to_is_never_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    below = MemoryBelow(some_records(), held=True)
    made = Cascade(below, 2 * PAGE)
    read_many = below.read_many

    def interrupted(*args: Any, **options: Any) -> None:
        read_many(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(below, "read_many", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.want(keys_of(0))
    late = below.flying
    below.held = False
    assert sorted(get(made, below, keys_of(1, 2, 3))) == keys_of(1, 2, 3), "in the other place"
    below.finish(*late)
    assert made.resident().keys() <= set(keys_of(1, 2, 3))
    with pytest.raises(TierError, match="cannot be closed"):
        made.close()


def test_a_call_that_is_left_early_lets_go() -> None:
    below = MemoryBelow(some_records(), held=True)
    with cascade(2, below) as (made, _):
        with made.want(keys_of(0, 1, 2)):
            assert below.flying == keys_of(0, 1)
        assert made.stats().leases == 0
        below.finish()
        with Finisher(below):
            assert sorted(get(made, below, keys_of(3, 4))) == keys_of(3, 4)


# ---- guesses


def test_guesses_are_read_behind_and_used() -> None:
    below = MemoryBelow(some_records(), held=True)
    with cascade(8, below) as (made, _):
        made.expect(keys_of(3, 4))
        assert below.log == [(key, False) for key in keys_of(3, 4)]
        with made.want(keys_of(4, 5)) as call:
            assert below.log[2:] == [(ExpertKey(0, 5), True)], "the guess is not read again"
            below.finish()
            assert sorted(lease.key for group in call for lease in group) == keys_of(4, 5)
        stats = made.stats()
        assert (stats.guesses, stats.guessed_right, stats.joined) == (2, 1, 1)


def test_guesses_wait_for_each_other_and_never_take_what_is_needed() -> None:
    below = MemoryBelow(some_records(experts=16))
    with cascade(5, below, window=2) as (made, _):
        for _ in range(2):
            get(made, below, keys_of(0, 1, 2))
        made.expect(keys_of(*range(6, 16)))
        assert set(keys_of(0, 1, 2)) <= made.resident().keys()
        assert sum(not urgent for _, urgent in below.log) == 1, "one slot of the window stays"
        assert get(made, below, keys_of(6, 15))[0] == ExpertKey(0, 6)


def test_a_guess_that_fails_is_no_failure_until_it_is_wanted() -> None:
    bad = [True]
    with cascade(8, MemoryBelow(some_records(), lambda key: bad[0])) as (made, below):
        made.expect(keys_of(0))
        assert (made.stats().failures, made.failed()) == (1, {})
        bad[0] = False
        assert get(made, below, keys_of(0)) == keys_of(0)


def test_recorded_heat_fills_memory_before_anybody_asks() -> None:
    rates = {ExpertKey(0, 3): 0.9, ExpertKey(1, 2): 0.8, ExpertKey(1, 5): 0.5, ExpertKey(0, 0): 0.1}
    with cascade(4, policy=POLICIES["heat"], rates=rates, window=1) as (made, below):
        made.warm()
        assert [*made.resident()] == [ExpertKey(0, 3), ExpertKey(1, 2), ExpertKey(1, 5)]
        assert not any(urgent for _, urgent in below.log)
        get(made, below, keys_of(1))
        assert made.resident()[ExpertKey(0, 1)] is Part.WINDOW, "not as hot as what heat promises"


# ---- budgets


def test_it_grows_and_shrinks_while_it_is_used() -> None:
    below = MemoryBelow(some_records(experts=12))
    with cascade(2, below) as (made, _):
        assert made.resize(6 * PAGE) == 6 * PAGE
        for n in range(6):
            get(made, below, keys_of(*range(n, 6)))
        held = made.acquire(ExpertKey(0, 0))
        assert made.resize(3 * PAGE) == 3 * PAGE
        assert made.resident().keys() == set(keys_of(0, 4, 5)), "the leased and the most used"
        more = [made.acquire(key) for key in keys_of(4, 5)]
        assert made.resize(PAGE) == 3 * PAGE, "leases are in the way"
        assert (made.stats().budget, made.stats().arena) == (PAGE, 3 * PAGE)
        for lease in more:
            assert right(below, lease)
            lease.release()
        assert made.stats().arena == PAGE, "it shrinks as they end"
        assert right(below, held)
        held.release()
        assert get(made, below, keys_of(1, 2)) == keys_of(1, 2)
        made.resize(1 << 30)
        assert made.stats().budget == 24 * PAGE, "no more than there are records"


def test_budgets_that_cannot_be_change_nothing() -> None:
    with cascade(2) as (made, below):
        for budget in (PAGE - 1, 0, -5):
            with pytest.raises(TierError, match="holds no expert"):
                made.resize(budget)
        assert made.stats().budget == 2 * PAGE
    with pytest.raises(TierError, match="holds no expert") as caught:
        Cascade(below, 10)
    assert caught.value.hint
    with pytest.raises(TierError, match="no records"):
        Cascade(MemoryBelow({}), PAGE)


def test_growth_that_the_machine_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with cascade(2) as (made, below):

        def refuse(slots: int) -> None:
            raise TierError("no memory", hint="")

        with monkeypatch.context() as patched:
            patched.setattr(made._tier, "grow", refuse)
            with pytest.raises(TierError, match="no memory"):
                made.resize(5 * PAGE)
        assert (made.stats().budget, made.stats().arena) == (2 * PAGE, 2 * PAGE)
        get(made, below, keys_of(0, 1, 2))
        assert made.stats().arena == 2 * PAGE


# ---- the rest


def test_unknown_experts_are_refused() -> None:
    with cascade(2) as (made, _):
        for call in (made.want, made.expect):
            with pytest.raises(TierError, match="layer=9") as caught:
                call([ExpertKey(9, 0)])
            assert caught.value.hint
        assert ExpertKey(9, 0) not in made
        assert ExpertKey(1, 5) in made
        assert len(list(made.keys())) == 12


def test_closing_waits_for_reads_and_tells_those_that_wait() -> None:
    below = MemoryBelow(some_records(), held=True)
    made = Cascade(below, 4 * PAGE)
    lease_of = made.want(keys_of(0))
    below.finish()
    held = made.next_group(lease_of)
    with pytest.raises(TierError, match="1 leases"):
        made.close()
    held[0].release()
    told: list[str] = []

    def wait() -> None:
        with made.want(keys_of(1)) as call:
            try:
                list(call)
            except TierError as error:
                told.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not below.flying:
        pass
    closer = threading.Thread(target=made.close)
    closer.start()
    waiter.join(10)
    assert told == ["the cascade is closed"]
    assert closer.is_alive(), "a read is still on its way into the arena"
    below.finish()
    closer.join(10)
    assert not closer.is_alive()
    made.close()
    for call in (lambda: made.want(keys_of(0)), lambda: made.resize(PAGE)):
        with pytest.raises(TierError, match="closed"):
            call()


def test_many_threads_see_no_wrong_byte_and_nobody_gets_stuck() -> None:
    below = MemoryBelow(some_records(experts=10), held=True)
    failures: list[BaseException] = []

    def work(made: Cascade, seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(40):
                wanted = rng.choice(10, rng.integers(1, 8), replace=False).tolist()
                layer = int(rng.integers(0, 2))
                with made.want(keys_of(*wanted, layer=layer), bool(rng.integers(0, 2))) as call:
                    for group in call:
                        assert all(right(below, lease) for lease in group)
                made.expect(keys_of(*rng.integers(0, 10, 3).tolist(), layer=1 - layer))
                if rng.random() < 0.2:
                    made.resize(int(rng.integers(1, 9)) * PAGE)
        except BaseException as error:
            failures.append(error)

    with cascade(4, below) as (made, _), Finisher(below):
        threads = [threading.Thread(target=work, args=(made, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert failures == []
        assert made.stats().leases == 0


def test_over_files(tmp_path: Path) -> None:
    """The real thing below: files, threads or io_uring, checksums."""
    disk = write_disk(tmp_path, 12, 3 * PAGE - 100, files=2)
    with NvmeTier(disk) as below, Cascade(below, 4 * 3 * PAGE) as made:
        for n in range(8):
            with made.want([ExpertKey(n % 3, e) for e in range(4)]) as call:
                for group in call:
                    for lease in group:
                        assert np.array_equal(memory_at(lease), disk.records[lease.key])
            assert call.failed == {}
        stats = made.stats()
        assert stats.reads == below.stats().reads > 12
        assert stats.latency.total == stats.reads
        assert len(made.findings()) == 1
