"""A RAM tier of slots: the tiers' promises, and what is its own: it grows and shrinks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import settings

from moet.base.errors import TierError
from moet.testing.tiers import PAGE, A, B, C, TierMachine, memory_at, pattern
from moet.tiers.api import ExpertKey, Tier
from moet.tiers.slots import SlotTier

KEYS = [ExpertKey(0, e) for e in range(8)]


def filled(tier: SlotTier, keys: list[ExpertKey]) -> SlotTier:
    for key in keys:
        tier.put(key, pattern(key, tier.slot_bytes))
    return tier


class PagesAreSlots(TierMachine):
    """Slots of a page: the machine's larger records are refused, all else is as in any tier."""

    def make_tier(self, capacity: int) -> Tier:
        return SlotTier(PAGE, capacity // PAGE)


TestSlotMachine = PagesAreSlots.TestCase
TestSlotMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_slot_holds_any_record_up_to_its_size() -> None:
    tier = SlotTier(PAGE + 1, 3)
    assert (tier.slot_bytes, tier.slots, tier.capacity) == (2 * PAGE, 3, 6 * PAGE)
    sizes = {A: 1, B: 2 * PAGE, C: PAGE}
    for key, nbytes in sizes.items():
        tier.put(key, pattern(key, nbytes))
    leases = [tier.acquire(key) for key in sizes]
    places = sorted((lease.address, lease.nbytes) for lease in leases)
    assert all(at % PAGE == 0 for at, _ in places)
    assert all(at + n <= after for (at, n), (after, _) in pairwise(places))
    with pytest.raises(TierError, match="no room"):
        tier.put(KEYS[7], pattern(A, 1))
    leases[1].release()
    tier.evict(B)
    with pytest.raises(TierError, match="a slot"):
        tier.reserve(KEYS[7], 2 * PAGE + 1)


def test_it_grows_under_leases_and_shrinks_to_what_is_used() -> None:
    tier = filled(SlotTier(PAGE, 2), KEYS[:2])
    held = [tier.acquire(key) for key in KEYS[:2]]
    before = [lease.address for lease in held]
    tier.grow(3)
    filled(tier, KEYS[2:5])
    assert tier.slots == 5
    for key in KEYS[2:4]:
        tier.evict(key)
    assert tier.shrink(4) == 2, "only free slots go"
    assert (tier.slots, tier.stats().used) == (3, 3 * PAGE)
    assert [lease.address for lease in held] == before
    for lease in held:
        assert np.array_equal(memory_at(lease), pattern(lease.key, PAGE))


def test_hollow_memory_is_given_back_and_filled_again() -> None:
    slot = 4 << 20
    tier = SlotTier(slot, 4)
    for key in KEYS[:4]:
        tier.put(key, np.full(slot, key.expert + 1, np.uint8))
    for key in KEYS[:3]:
        tier.evict(key)
    before = rss()
    assert tier.shrink(9) == 3
    assert before - rss() > 11 << 20
    tier.grow(2)
    assert tier.slots == 3
    assert rss() > before - (5 << 20), "what is promised is there"
    with tier.reserve(A, slot) as reservation:
        assert not reservation.buffer.any(), "fresh pages"
    with tier.acquire(KEYS[3]) as lease:
        assert (lease.view() == 4).all()


def rss() -> int:
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * PAGE


def test_memory_is_unpinned_before_it_goes() -> None:
    log: list[tuple[str, int]] = []
    tier = SlotTier(
        PAGE,
        2,
        pin=lambda address, nbytes: log.append(("pin", nbytes)),
        unpin=lambda address: log.append(("unpin", 0)),
    )
    tier.grow(2)
    assert log == [("pin", 2 * PAGE), ("pin", 2 * PAGE)]
    tier.shrink(1)
    assert log[2:] == [("unpin", 0)], "the segment that has lost a slot"
    tier.grow(1)
    assert log[3:] == [("pin", 2 * PAGE)], "it is whole again"
    tier.shrink(2)
    assert log[4:] == [("unpin", 0)]
    tier.close()
    assert log[5:] == [("unpin", 0)]


def test_growth_that_does_not_fit_adds_nothing() -> None:
    tier = SlotTier(PAGE, 1)
    tier.shrink(1)
    with pytest.raises(TierError, match="do not fit"):
        tier.grow(1 << 40)
    assert tier.slots == 0
    tier.grow(1)
    tier.put(A, pattern(A, PAGE))


def test_ends_of_leases_are_told_once() -> None:
    ended: list[ExpertKey] = []
    tier = filled(SlotTier(PAGE, 1, released=ended.append), KEYS[:1])
    lease = tier.acquire(KEYS[0])
    lease.release()
    lease.release()
    assert ended == [KEYS[0]]


@pytest.mark.parametrize("slots", [0, -1])
def test_no_slot_is_refused(slots: int) -> None:
    with pytest.raises(TierError) as caught:
        SlotTier(PAGE, slots)
    assert caught.value.hint
