"""The wrappers that tests put around tiers keep the protocol, and do what they say."""

from __future__ import annotations

import pytest
from hypothesis import settings

from moet.base.errors import TierError
from moet.testing.faults import FaultyTier, LatencyTier, WrappedTier, fail_nth
from moet.testing.tiers import PAGE, A, B, TierConformance, TierMachine, pattern
from moet.tiers.api import ExpertKey, Tier
from moet.tiers.ram import RamTier


def ram(capacity: int) -> RamTier:
    return RamTier(capacity, populate=False)


class TestLatencyTier(TierConformance):
    def make_tier(self, capacity: int) -> Tier:
        return LatencyTier(ram(capacity), {"reserve": 1e-5, "acquire": 1e-5, "evict": 1e-5})


class TestFaultyTier(TierConformance):
    def make_tier(self, capacity: int) -> Tier:
        return FaultyTier(ram(capacity), lambda operation, key: False)


class LatencyMachine(TierMachine):
    def make_tier(self, capacity: int) -> Tier:
        return LatencyTier(ram(capacity), {})


TestLatencyMachine = LatencyMachine.TestCase
TestLatencyMachine.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)


def test_latency_is_added_where_it_is_asked_for() -> None:
    waits: list[float] = []
    tier = LatencyTier(ram(PAGE), {"acquire": 0.25}, waits.append)
    tier.put(A, pattern(A, 10))
    assert waits == []
    tier.acquire(A).release()
    tier.evict(A)
    assert waits == [0.25]
    tier.close()


def test_the_nth_operation_fails_and_only_that() -> None:
    tier = FaultyTier(ram(2 * PAGE), fail_nth("reserve", 2))
    tier.put(A, pattern(A, 10))
    with pytest.raises(TierError, match="on purpose"):
        tier.put(B, pattern(B, 10))
    assert list(tier.keys()) == [A]
    tier.put(B, pattern(B, 10))
    assert tier.failures == 1
    tier.close()


def test_a_plan_may_pick_a_key() -> None:
    tier = FaultyTier(ram(2 * PAGE), lambda operation, key: key == B and operation == "acquire")
    for key in (A, B):
        tier.put(key, pattern(key, 10))
    tier.acquire(A).release()
    with pytest.raises(TierError, match="on purpose"):
        tier.acquire(B)
    tier.close()


def test_a_plain_wrapper_changes_nothing() -> None:
    tier = WrappedTier(ram(PAGE))
    tier.put(A, pattern(A, 10))
    assert A in tier
    assert ExpertKey(9, 9) not in tier
    assert tier.stats() == tier.inner.stats()
    tier.close()
