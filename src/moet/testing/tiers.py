"""The exam of every tier: inherit ``TierConformance`` and ``TierMachine``, say how one is made.

::

    class TestMyTier(TierConformance):
        def make_tier(self, capacity: int) -> Tier:
            return MyTier(capacity)

    class MyMachine(TierMachine):
        def make_tier(self, capacity: int) -> Tier:
            return MyTier(capacity)

    TestMyMachine = MyMachine.TestCase

A tier whose addresses a CPU cannot read says in ``memory_at`` how its memory is looked at.
"""

# ruff: noqa: D102 - a test's name is its sentence
from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from moet.base.errors import TierError
from moet.tiers.api import RECORD_ALIGNMENT, ExpertKey, Lease, Tier

PAGE = RECORD_ALIGNMENT
Look = Callable[[Lease], NDArray[np.uint8]]
A, B, C = ExpertKey(0, 0), ExpertKey(0, 1), ExpertKey(3, 2)


def pattern(key: ExpertKey, nbytes: int, salt: int = 0) -> NDArray[np.uint8]:
    """Bytes that tell one record from another, u8 [nbytes]."""
    return np.random.default_rng((key.layer, key.expert, salt)).integers(0, 256, nbytes, np.uint8)


def memory_at(lease: Lease) -> NDArray[np.uint8]:
    """What lies at the lease's address, as a kernel would read it."""
    return np.frombuffer(ctypes.string_at(lease.address, lease.nbytes), np.uint8)


class TierConformance:
    """What ``moet.tiers.api`` promises, promise by promise."""

    def make_tier(self, capacity: int) -> Tier:
        """A fresh tier that holds ``capacity`` bytes."""
        raise NotImplementedError

    def memory_at(self, lease: Lease) -> NDArray[np.uint8]:
        """What lies at the lease's address now, u8 [nbytes], read past the tier."""
        return memory_at(lease)

    @contextmanager
    def tier(self, pages: int = 8) -> Iterator[Tier]:
        """A tier of so many pages, closed afterwards."""
        tier = self.make_tier(pages * PAGE)
        yield tier
        tier.close()

    def test_a_record_reads_back(self) -> None:
        with self.tier() as tier:
            data = pattern(A, 5000)
            tier.put(A, data)
            with tier.acquire(A) as lease:
                assert (lease.key, lease.nbytes) == (A, 5000)
                assert np.array_equal(lease.view(), data)
                assert np.array_equal(self.memory_at(lease), data)

    def test_records_start_at_pages_and_do_not_touch(self) -> None:
        with self.tier() as tier, ExitStack() as leases:
            sizes = {A: 1, B: PAGE, C: PAGE + 1}
            for key, nbytes in sizes.items():
                tier.put(key, pattern(key, nbytes))
            held = {key: leases.enter_context(tier.acquire(key)) for key in sizes}
            places = sorted((lease.address, lease.nbytes) for lease in held.values())
            assert all(address % PAGE == 0 for address, _ in places)
            assert all(a + n <= b for (a, n), (b, _) in pairwise(places))
            for key, lease in held.items():
                assert np.array_equal(lease.view(), pattern(key, sizes[key]))

    def test_views_cannot_be_written(self) -> None:
        with self.tier() as tier:
            tier.put(A, pattern(A, 100))
            with tier.acquire(A) as lease:
                view = lease.view()
                with pytest.raises(ValueError, match="read-only"):
                    view[0] = 1
                del view

    def test_a_record_is_invisible_while_it_is_written(self) -> None:
        with self.tier() as tier:
            with tier.reserve(A, 64) as reservation:
                assert A not in tier
                assert list(tier.keys()) == []
                with pytest.raises(TierError):
                    tier.acquire(A)
                reservation.buffer[:] = 7
            assert A in tier
            assert list(tier.keys()) == [A]

    def test_a_failed_write_leaves_nothing(self) -> None:
        with self.tier() as tier:
            before = tier.stats().used
            with pytest.raises(ZeroDivisionError):
                _break_off(tier, A, 64)
            assert A not in tier
            assert tier.stats().used == before
            tier.put(A, pattern(A, 64))
            with tier.acquire(A) as lease:
                assert np.array_equal(lease.view(), pattern(A, 64))

    def test_a_key_is_written_once(self) -> None:
        with self.tier() as tier:
            tier.put(A, pattern(A, 10))
            with pytest.raises(TierError, match="there already") as caught:
                tier.reserve(A, 10)
            assert caught.value.hint
            with tier.reserve(B, 10), pytest.raises(TierError):
                tier.reserve(B, 10)

    @pytest.mark.parametrize("nbytes", [0, -1])
    def test_empty_records_are_refused(self, nbytes: int) -> None:
        with self.tier() as tier, pytest.raises(TierError):
            tier.reserve(A, nbytes)

    def test_what_does_not_fit_is_refused_with_the_numbers(self) -> None:
        with self.tier(pages=2) as tier:
            tier.put(A, pattern(A, PAGE))
            with pytest.raises(TierError, match=r"KiB") as caught:
                tier.reserve(B, PAGE + 1)
            assert caught.value.hint
            tier.put(B, pattern(B, PAGE))  # the refusal took nothing

    def test_a_lease_forbids_eviction_until_the_last_one_ends(self) -> None:
        with self.tier() as tier:
            tier.put(A, pattern(A, 10))
            first, second = tier.acquire(A), tier.acquire(A)
            for lease in (first, second):
                with pytest.raises(TierError, match="leased"):
                    tier.evict(A)
                lease.release()
            tier.evict(A)
            assert A not in tier

    def test_a_released_lease_is_stale(self) -> None:
        with self.tier() as tier:
            tier.put(A, pattern(A, 10))
            lease = tier.acquire(A)
            lease.release()
            lease.release()  # twice is once
            with pytest.raises(TierError, match="released"):
                _ = lease.address
            with pytest.raises(TierError, match="released"):
                lease.view()
            assert tier.stats().leases == 0

    def test_generations_never_repeat(self) -> None:
        with self.tier(pages=1) as tier:
            seen = []
            for salt in range(5):
                tier.put(A, pattern(A, 10, salt))
                with tier.acquire(A) as lease:
                    seen.append(lease.generation)
                    assert np.array_equal(lease.view(), pattern(A, 10, salt))
                tier.evict(A)
            assert len(set(seen)) == 5

    def test_freed_room_is_used_again(self) -> None:
        with self.tier(pages=4) as tier:
            for key in (A, B, C):
                tier.put(key, pattern(key, PAGE))
            tier.evict(A)
            tier.evict(B)
            tier.put(A, pattern(A, 2 * PAGE, 1))  # two neighbours make one piece
            with tier.acquire(A) as a, tier.acquire(C) as c:
                assert np.array_equal(a.view(), pattern(A, 2 * PAGE, 1))
                assert np.array_equal(c.view(), pattern(C, PAGE))

    def test_missing_records_are_named(self) -> None:
        with self.tier() as tier:
            for call in (tier.acquire, tier.evict):
                with pytest.raises(TierError, match="layer=3") as caught:
                    call(C)
                assert caught.value.hint

    def test_statistics_add_up(self) -> None:
        with self.tier(pages=4) as tier:
            tier.put(A, pattern(A, PAGE + 1))
            with tier.acquire(A), tier.acquire(A), pytest.raises(TierError):
                tier.acquire(B)
            stats = tier.stats()
            assert (stats.capacity, stats.used, stats.records) == (4 * PAGE, 2 * PAGE, 1)
            assert (stats.leases, stats.hits, stats.misses, stats.evictions) == (0, 2, 1, 0)
            assert (stats.bytes_written, stats.bytes_leased) == (PAGE + 1, 2 * (PAGE + 1))
            tier.evict(A)
            assert (tier.stats().used, tier.stats().evictions) == (0, 1)

    def test_a_closed_tier_says_so(self) -> None:
        tier = self.make_tier(PAGE)
        tier.put(A, pattern(A, 10))
        lease = tier.acquire(A)
        with pytest.raises(TierError, match="1 lease"):
            tier.close()
        lease.release()
        tier.close()
        tier.close()
        for call in (tier.acquire, tier.evict, lambda key: tier.reserve(key, 1)):
            with pytest.raises(TierError, match="closed"):
                call(A)

    def test_threads_never_see_a_wrong_byte(self) -> None:
        """Writers, evictors and readers on more keys than fit; readers compare every byte."""
        tier = self.make_tier(6 * PAGE)
        failures: list[BaseException] = []
        threads = [
            threading.Thread(target=_churn, args=(tier, seed, self.memory_at, failures))
            for seed in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert tier.stats().leases == 0
        tier.close()


def _break_off(tier: Tier, key: ExpertKey, nbytes: int) -> None:
    """Half a write, then an exception of no tier's making."""
    with tier.reserve(key, nbytes) as reservation:
        reservation.buffer[: nbytes // 2] = 7
        raise ZeroDivisionError


def _churn(tier: Tier, seed: int, look: Look, failures: list[BaseException]) -> None:
    rng = random.Random(seed)
    keys = [ExpertKey(0, e) for e in range(9)]
    actions: list[Callable[[Tier, ExpertKey], None]] = [
        lambda tier, key: _write(tier, key, rng),
        lambda tier, key: _read(tier, key, look),
        lambda tier, key: tier.evict(key),
        lambda tier, key: _read(tier, key, look),
    ]
    try:
        for _ in range(150):
            try:
                rng.choice(actions)(tier, rng.choice(keys))
            except TierError:
                continue  # full, taken, missing or leased: what the others do decides
    except BaseException as error:
        failures.append(error)


def _write(tier: Tier, key: ExpertKey, rng: random.Random) -> None:
    """A record whose first byte names its pattern."""
    salt = rng.randrange(256)
    data = pattern(key, rng.choice([40, PAGE, PAGE + 1]), salt)
    data[0] = salt
    tier.put(key, data)


def _read(tier: Tier, key: ExpertKey, look: Look) -> None:
    with tier.acquire(key) as lease:
        got = look(lease)
        wanted = pattern(key, lease.nbytes, int(got[0]))
        wanted[0] = got[0]
        assert np.array_equal(got, wanted), f"{key} holds another record's bytes"


@dataclass
class _Held:
    lease: Lease
    data: NDArray[np.uint8]


class TierMachine(RuleBasedStateMachine):
    """A tier against a dict, in any order of calls."""

    PAGES = 6
    keys = st.builds(ExpertKey, st.integers(0, 1), st.integers(0, 3))

    def __init__(self) -> None:
        super().__init__()
        self.tier = self.make_tier(self.PAGES * PAGE)
        self.model: dict[ExpertKey, NDArray[np.uint8]] = {}
        self.held: list[_Held] = []
        self.generations: set[int] = set()
        self.salt = 0

    def make_tier(self, capacity: int) -> Tier:
        """A fresh tier that holds ``capacity`` bytes."""
        raise NotImplementedError

    def memory_at(self, lease: Lease) -> NDArray[np.uint8]:
        """What lies at the lease's address now, u8 [nbytes], read past the tier."""
        return memory_at(lease)

    def teardown(self) -> None:
        """Releases and closes: nothing may be left."""
        for held in self.held:
            held.lease.release()
        assert self.tier.stats().leases == 0
        self.tier.close()

    def _new(self, key: ExpertKey, nbytes: int) -> NDArray[np.uint8]:
        self.salt += 1
        return pattern(key, nbytes, self.salt)

    @rule(key=keys, nbytes=st.integers(1, 3 * PAGE))
    def put(self, key: ExpertKey, nbytes: int) -> None:
        """Works where the key is free and the room is there in one piece."""
        data = self._new(key, nbytes)
        try:
            self.tier.put(key, data)
        except TierError:
            used = sum(-(-d.size // PAGE) for d in self.model.values())
            free = self.PAGES - used
            # With holes the room may not be in one piece, so a refusal proves little; but an
            # empty tier must take it.
            assert key in self.model or nbytes > PAGE or free == 0
        else:
            assert key not in self.model
            self.model[key] = data

    @rule(key=keys, nbytes=st.integers(1, PAGE))
    def fail_to_write(self, key: ExpertKey, nbytes: int) -> None:
        """A write that breaks off changes nothing."""
        with suppress(TierError, ZeroDivisionError):
            _break_off(self.tier, key, nbytes)

    @rule(key=keys)
    def acquire(self, key: ExpertKey) -> None:
        """Finds what the dict has, with its bytes and a number of its own."""
        if key not in self.model:
            with pytest.raises(TierError):
                self.tier.acquire(key)
            return
        self.held.append(_Held(self.tier.acquire(key), self.model[key]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Any lease, in any order."""
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        held.lease.release()
        with pytest.raises(TierError):
            _ = held.lease.address

    @rule(key=keys)
    def evict(self, key: ExpertKey) -> None:
        """Works where the record is there and nobody holds it."""
        free = key in self.model and all(h.lease.key != key for h in self.held)
        if free:
            self.tier.evict(key)
            del self.model[key]
        else:
            with pytest.raises(TierError):
                self.tier.evict(key)

    @invariant()
    def same_keys(self) -> None:
        """The tier holds what the dict holds."""
        assert set(self.tier.keys()) == set(self.model)
        assert all(key in self.tier for key in self.model)

    @invariant()
    def held_bytes_stay(self) -> None:
        """Whatever happens to others, a leased record keeps its bytes."""
        for held in self.held:
            assert np.array_equal(self.memory_at(held.lease), held.data)

    @invariant()
    def numbers_add_up(self) -> None:
        """Counters follow the dict."""
        stats = self.tier.stats()
        pages = sum(-(-data.size // PAGE) for data in self.model.values())
        assert (stats.used, stats.records) == (pages * PAGE, len(self.model))
        assert stats.leases == len(self.held)
