"""The card tier on a card of host memory: the conformance suite, then copies that take time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from hypothesis import settings

from moet.base.errors import TierError
from moet.testing.card import UNWRITTEN, HostCard, bytes_at
from moet.testing.tiers import PAGE, A, B, C, TierConformance, TierMachine, memory_at, pattern
from moet.tiers.api import ExpertKey, Lease, Tier
from moet.tiers.card import MOST_IN_FLIGHT, CardTier
from moet.tiers.ram import RamTier

SOON = 10.0
"""Seconds after which something that should happen has not."""


def fail_at(operation: str, n: int = 1) -> Callable[[str], bool]:
    """The n-th of such operations fails, from 1."""
    seen = 0

    def fails(name: str) -> bool:
        nonlocal seen
        seen += name == operation
        return name == operation and seen == n

    return fails


class TestCardTier(TierConformance):
    @pytest.fixture(autouse=True)
    def _card(self) -> Iterator[None]:
        self.card = HostCard()
        yield
        assert self.card.left == (0, 0, 0)
        self.card.close()

    def make_tier(self, capacity: int) -> Tier:
        return CardTier(self.card, capacity, record_bytes=capacity, staging=3)


class CardMachine(TierMachine):
    def make_tier(self, capacity: int) -> Tier:
        self.card = HostCard()
        return CardTier(self.card, capacity, record_bytes=3 * PAGE, staging=2)

    def teardown(self) -> None:
        super().teardown()
        assert self.card.left == (0, 0, 0)
        self.card.close()


TestCardMachine = CardMachine.TestCase
TestCardMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


class Rig:
    """A card, a tier on it, and a RAM tier full of records of a page each."""

    def __init__(
        self,
        pages: int = 16,
        staging: int = 2,
        patience_s: float = SOON,
        fails: Callable[[str], bool] = lambda operation: False,
    ) -> None:
        self.card = HostCard(fails=fails)
        self.tier = CardTier(
            self.card, pages * PAGE, record_bytes=PAGE, staging=staging, patience_s=patience_s
        )
        self.ram = RamTier(32 * PAGE, populate=False)
        self.keys = [ExpertKey(1, e) for e in range(32)]
        for key in self.keys:
            self.ram.put(key, pattern(key, PAGE))

    @contextmanager
    def leases(self, count: int) -> Iterator[list[Lease]]:
        with ExitStack() as held:
            yield [held.enter_context(self.ram.acquire(key)) for key in self.keys[:count]]

    def upload(self, count: int) -> int:
        with self.leases(count) as leases:
            return self.tier.upload(leases)

    def assert_whole(self) -> None:
        """Every readable record has its bytes."""
        for key in list(self.tier.keys()):
            with self.tier.acquire(key) as lease:
                assert np.array_equal(memory_at(lease), pattern(key, lease.nbytes))


@contextmanager
def rig(**arguments: object) -> Iterator[Rig]:
    made = Rig(**arguments)  # type: ignore[arg-type]
    yield made
    made.tier.close()
    made.ram.close()
    assert made.card.left[:2] == (0, 0)
    made.card.close()


# ---- visibility


def test_a_record_is_invisible_until_its_copy_has_landed() -> None:
    with rig() as r, ThreadPoolExecutor() as pool:
        with r.card.stalled():
            done = pool.submit(r.tier.put, A, pattern(A, PAGE))
            r.card.wait_for_copies(1)
            with pytest.raises(TimeoutError):
                done.result(timeout=0.05)
            assert A not in r.tier
            with pytest.raises(TierError, match="no record"):
                r.tier.acquire(A)
            with pytest.raises(TierError, match="there already"):
                r.tier.reserve(A, PAGE)
            with pytest.raises(TierError, match="1 reservation"):
                r.tier.close()
        done.result(timeout=SOON)
        with r.tier.acquire(A) as lease:
            assert np.array_equal(memory_at(lease), pattern(A, PAGE))


def test_addresses_are_the_card_s_and_buffers_are_not() -> None:
    with rig() as r:
        with r.tier.reserve(A, 10) as reservation:
            assert reservation.buffer.ctypes.data == reservation.address
            reservation.buffer[:] = 1
            staging = reservation.address
        with r.tier.acquire(A) as lease:
            assert lease.address % PAGE == 0
            assert lease.address != staging
            copy = lease.view()
        assert copy.tolist() == [1] * 10


def test_a_room_used_again_has_another_generation() -> None:
    with rig(pages=1) as r:
        r.tier.put(A, pattern(A, PAGE))
        with r.tier.acquire(A) as lease:
            first = lease.generation, lease.address
        r.tier.evict(A)
        r.tier.put(B, pattern(B, PAGE))
        with r.tier.acquire(B) as lease:
            assert lease.address == first[1]
            assert lease.generation != first[0]


# ---- staging


def test_a_reservation_waits_for_a_buffer() -> None:
    with rig(staging=2) as r, ThreadPoolExecutor() as pool:
        with r.tier.reserve(A, 8) as a, r.tier.reserve(B, 8) as b:
            third = pool.submit(r.tier.put, C, pattern(C, 8))
            with pytest.raises(TimeoutError):
                third.result(timeout=0.05)
            a.buffer[:], b.buffer[:] = pattern(A, 8), pattern(B, 8)
        third.result(timeout=SOON)
        r.assert_whole()


def test_a_buffer_that_never_comes_is_an_error_and_takes_no_room() -> None:
    with rig(staging=2, patience_s=0.02) as r, r.tier.reserve(A, 8), r.tier.reserve(B, 8):
        used = r.tier.stats().used
        with pytest.raises(TierError, match="all 2 staging buffers were in use") as caught:
            r.tier.reserve(C, 8)
        assert caught.value.hint
        assert r.tier.stats().used == used


def test_a_record_larger_than_a_buffer_is_refused_with_the_numbers() -> None:
    with rig() as r:
        with pytest.raises(TierError, match=r"4097 bytes .* staging buffer of 4096") as caught:
            r.tier.reserve(A, PAGE + 1)
        assert caught.value.hint
        assert r.tier.stats().used == 0


@pytest.mark.parametrize(("staging", "record_bytes"), [(1, PAGE), (2, 0)])
def test_a_ring_that_cannot_overlap_is_refused(staging: int, record_bytes: int) -> None:
    card = HostCard()
    with pytest.raises(TierError, match="staging buffers"):
        CardTier(card, PAGE, record_bytes=record_bytes, staging=staging)
    assert card.left == (0, 0, 0)
    card.close()


# ---- uploads


@pytest.mark.parametrize("direct", [False, True])
def test_uploads_keep_every_byte(direct: bool) -> None:
    with rig() as r:
        if direct:
            r.tier.register_host(r.ram.address_of(0), r.ram.capacity)
        assert r.upload(16) == 16 * PAGE
        assert set(r.tier.keys()) == set(r.keys[:16])
        r.assert_whole()
        expected = (16 * PAGE, 0) if direct else (0, 16 * PAGE)
        assert (r.tier.direct_bytes, r.tier.staged_bytes) == expected


def test_several_copies_are_under_way_at_once() -> None:
    with rig(staging=3) as r, ThreadPoolExecutor() as pool:
        with r.card.stalled():
            done = pool.submit(r.upload, 16)
            r.card.wait_for_copies(3)
        done.result(timeout=SOON)
        r.tier.register_host(r.ram.address_of(0), r.ram.capacity)
        for key in r.keys[:16]:
            r.tier.evict(key)
        with r.card.stalled():
            done = pool.submit(r.upload, 16)
            r.card.wait_for_copies(MOST_IN_FLIGHT)
        done.result(timeout=SOON)
        r.assert_whole()


def test_records_outside_of_registered_memory_are_staged() -> None:
    with rig() as r:
        r.tier.register_host(r.ram.address_of(0), 2 * PAGE)
        r.upload(4)
        assert (r.tier.direct_bytes, r.tier.staged_bytes) == (2 * PAGE, 2 * PAGE)
        r.assert_whole()


def test_uploads_of_several_threads_share_the_buffers_without_a_knot() -> None:
    with rig(pages=32, staging=2) as r, ThreadPoolExecutor(4) as pool, r.leases(32) as leases:
        jobs = [pool.submit(r.tier.upload, leases[i::4]) for i in range(4)]
        assert sum(job.result(timeout=SOON) for job in jobs) == 32 * PAGE
        assert len(list(r.tier.keys())) == 32
        r.assert_whole()


def test_an_upload_that_runs_out_of_room_leaves_whole_records() -> None:
    with rig(pages=5) as r:
        with pytest.raises(TierError, match="no room"):
            r.upload(8)
        assert set(r.tier.keys()) == set(r.keys[:5])
        r.assert_whole()
        r.tier.evict(r.keys[0])
        r.tier.put(r.keys[7], pattern(r.keys[7], PAGE))
        r.assert_whole()


# ---- eviction


def test_a_fence_holds_off_the_next_copy_until_the_step_has_ended() -> None:
    with rig(pages=1) as r, ThreadPoolExecutor() as pool:
        r.tier.put(A, pattern(A, PAGE))
        lease = r.tier.acquire(A)
        address = lease.address
        lease.release()
        step = r.card.record(stream=7)
        r.tier.evict(A, fence=step)
        done = pool.submit(r.tier.put, B, pattern(B, PAGE))
        r.card.wait_for_copies(1)
        with pytest.raises(TimeoutError):
            done.result(timeout=0.05)
        # The step still reads the old record.
        assert np.array_equal(bytes_at(address, PAGE), pattern(A, PAGE))
        r.card.finish(step)
        done.result(timeout=SOON)
        assert r.card.done(step)
        r.card.drop(step)
        r.assert_whole()


def test_a_leased_record_is_never_overwritten() -> None:
    with rig(pages=2) as r:
        r.upload(2)
        with r.tier.acquire(r.keys[0]) as lease:
            for salt in range(4):
                with pytest.raises(TierError, match="leased"):
                    r.tier.evict(r.keys[0])
                r.tier.evict(r.keys[1])
                r.tier.put(r.keys[1], pattern(r.keys[1], PAGE, salt))
            assert np.array_equal(memory_at(lease), pattern(r.keys[0], PAGE))


# ---- pauses


def test_uploads_stay_out_of_a_pause() -> None:
    with rig() as r, ThreadPoolExecutor() as pool:
        with r.card.paused():
            before = len(r.card.calls)
            done = pool.submit(r.upload, 8)
            with pytest.raises(TimeoutError):
                done.result(timeout=0.05)
            assert len(r.card.calls) == before
            assert r.keys[0] not in r.tier  # the books can be read meanwhile
        done.result(timeout=SOON)
        r.assert_whole()


# ---- faults


@pytest.mark.parametrize("operation", ["copy_in", "landing", "wait"])
@pytest.mark.parametrize("direct", [False, True])
def test_a_failed_copy_is_named_and_leaves_nothing(operation: str, direct: bool) -> None:
    with rig(staging=4, fails=fail_at(operation, 3)) as r:
        if direct:
            r.tier.register_host(r.ram.address_of(0), r.ram.capacity)
        with pytest.raises(TierError, match=r"expert=2\) to the card, 4\.00 KiB") as caught:
            r.upload(8)
        assert caught.value.hint
        assert r.keys[2] not in r.tier
        r.assert_whole()
        r.tier.put(r.keys[2], pattern(r.keys[2], PAGE))
        r.assert_whole()


def test_room_is_free_again_where_a_copy_did_not_start() -> None:
    with rig(pages=1, fails=fail_at("copy_in")) as r:
        with pytest.raises(TierError, match="did not start"):
            r.tier.put(A, pattern(A, PAGE))
        assert r.tier.stats().used == 0
        r.tier.put(A, pattern(A, PAGE))


@pytest.mark.parametrize("operation", ["wait", "astray"])
def test_room_is_not_used_again_where_a_copy_may_still_run(operation: str) -> None:
    with rig(pages=2, staging=2, patience_s=0.02, fails=fail_at(operation)) as r:
        with r.card.stalled():
            with pytest.raises(TierError, match="on purpose"):
                r.tier.put(A, pattern(A, PAGE))
            assert A not in r.tier
            assert r.tier.stats().used == PAGE
        r.tier.put(B, pattern(B, PAGE))
        r.assert_whole()
        with pytest.raises(TierError, match="no room"):
            r.tier.put(C, pattern(C, PAGE))


def test_more_than_the_card_has_is_refused_with_the_numbers() -> None:
    card = HostCard(capacity=8 * PAGE)
    with pytest.raises(TierError, match=r"no 36\.00 KiB .* 32\.00 KiB of 32\.00 KiB are") as caught:
        CardTier(card, 8 * PAGE, record_bytes=PAGE)
    assert caught.value.hint
    assert card.left == (0, 0, 0)
    card.close()


def test_memory_that_cannot_be_pinned_leaves_the_card_free() -> None:
    card = HostCard(fails=fail_at("pin"))
    with pytest.raises(TierError, match=r"16\.00 KiB of host memory cannot be pinned"):
        CardTier(card, PAGE, record_bytes=PAGE)
    assert card.left == (0, 0, 0)
    card.close()


def test_memory_that_cannot_be_registered_is_an_error_and_uploads_go_on_staged() -> None:
    with rig(fails=fail_at("register")) as r:
        with pytest.raises(TierError, match="cannot be page-locked") as caught:
            r.tier.register_host(r.ram.address_of(0), r.ram.capacity)
        assert caught.value.hint
        r.upload(3)
        assert r.tier.staged_bytes == 3 * PAGE
        r.assert_whole()


def test_a_closed_tier_registers_nothing() -> None:
    card = HostCard()
    tier = CardTier(card, PAGE, record_bytes=PAGE)
    tier.close()
    with pytest.raises(TierError, match="closed"):
        tier.register_host(PAGE, PAGE)
    card.close()


def test_reading_back_fails_by_name() -> None:
    with rig(fails=fail_at("copy_out")) as r:
        r.tier.put(A, pattern(A, PAGE))
        with r.tier.acquire(A) as lease, pytest.raises(TierError, match="cannot be read back"):
            lease.view()


# ---- the stand-in itself


def test_the_stand_in_copies_late() -> None:
    card = HostCard()
    there, here = card.allocate(PAGE), card.pin(PAGE)
    source = bytes_at(here, PAGE)
    source[:] = 1
    assert set(bytes_at(there, PAGE)) == {UNWRITTEN}
    with card.stalled():
        event = card.copy_in(there, here, PAGE)
        assert not card.done(event)
        source[:] = 2  # too early: the copy has not been done
    card.wait(event)
    back = np.empty(PAGE, np.uint8)
    card.copy_out(back.ctypes.data, there, PAGE)
    assert set(back) == {2}
    card.drop(event)
    card.free(there)
    card.unpin(here)
    card.close()


def test_the_stand_in_refuses_what_a_card_would_not_survive() -> None:
    card = HostCard()
    there, here = card.allocate(PAGE), card.pin(PAGE)
    pageable = np.zeros(PAGE, np.uint8)
    with pytest.raises(Exception, match="not page-locked"):
        card.copy_in(there, pageable.ctypes.data, PAGE)
    with pytest.raises(Exception, match="not of the card"):
        card.copy_in(there + 1, here, PAGE)
    with card.stalled():
        event = card.copy_in(there, here, PAGE)
        with pytest.raises(Exception, match="while a copy needs it"):
            card.free(there)
    card.wait(event)
    card.close()
