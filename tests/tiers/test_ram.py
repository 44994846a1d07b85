"""The RAM tier: the conformance suite, and what is its own: memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import settings

from moet.base.errors import TierError
from moet.machine.memory import read_memory
from moet.testing.tiers import PAGE, A, TierConformance, TierMachine, pattern
from moet.tiers.api import Tier
from moet.tiers.arena import HUGE_PAGE, Arena
from moet.tiers.ram import RamTier


class TestRamTier(TierConformance):
    def make_tier(self, capacity: int) -> Tier:
        return RamTier(capacity, populate=False)


class RamMachine(TierMachine):
    def make_tier(self, capacity: int) -> Tier:
        return RamTier(capacity, populate=False)


TestRamMachine = RamMachine.TestCase
TestRamMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def resident(address: int, nbytes: int) -> int:
    """Bytes of a range that are in memory: bit 63 of its pagemap entries (proc_pid_pagemap(5))."""
    with Path("/proc/self/pagemap").open("rb") as stream:
        stream.seek(address // PAGE * 8)
        entries = np.frombuffer(stream.read(nbytes // PAGE * 8), "<u8")
    return int((entries >> 63).sum()) * PAGE


def test_capacity_is_rounded_up_to_pages() -> None:
    with RamTier(1, populate=False) as tier:
        assert tier.capacity == PAGE


@pytest.mark.parametrize("capacity", [0, -4096])
def test_no_capacity_is_refused(capacity: int) -> None:
    with pytest.raises(TierError) as caught:
        RamTier(capacity)
    assert caught.value.hint


def test_populated_memory_is_there_before_it_is_used() -> None:
    nbytes = 4 * HUGE_PAGE
    lazy, eager = Arena(nbytes, populate=False), Arena(nbytes, populate=True)
    assert resident(eager.address, nbytes) == nbytes
    assert resident(lazy.address, nbytes) == 0
    assert eager.address % HUGE_PAGE == lazy.address % HUGE_PAGE == 0
    eager.close()
    lazy.close()


def test_fresh_memory_is_zero() -> None:
    arena = Arena(3 * PAGE, populate=True)
    assert not arena.bytes.any()
    arena.close()


def test_more_than_the_machine_has_is_refused_with_the_numbers() -> None:
    with pytest.raises(TierError, match=r"1\.00 TiB .* do not fit in the .* GiB") as caught:
        RamTier(1 << 40)
    assert caught.value.hint


def test_a_container_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = read_memory()
    tight = type(memory)(**{**vars(memory), "available": 1 << 20, "limit": 3 << 20})
    monkeypatch.setattr("moet.tiers.arena.read_memory", lambda: tight)
    with pytest.raises(TierError, match=r"2\.00 MiB .* 1\.00 MiB .* container: 3\.00 MiB"):
        RamTier(2 << 20)
    RamTier(1 << 20, populate=False).close()


def test_old_kernels_are_populated_by_touching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moet.tiers.arena._MADV_POPULATE_WRITE", 250)  # unknown: EINVAL
    arena = Arena(HUGE_PAGE, populate=True)
    assert resident(arena.address, HUGE_PAGE) == HUGE_PAGE
    arena.close()


def test_a_view_kept_too_long_never_sees_unmapped_memory() -> None:
    tier = RamTier(PAGE, populate=False)
    tier.put(A, pattern(A, 100))
    lease = tier.acquire(A)
    view = lease.view()
    lease.release()
    tier.close()
    assert np.array_equal(view, pattern(A, 100))


def test_a_closed_tier_gives_its_memory_back() -> None:
    before = read_rss()
    tier = RamTier(64 << 20)
    assert read_rss() - before > 60 << 20
    tier.close()
    assert read_rss() - before < 4 << 20


def read_rss() -> int:
    return psutil.Process().memory_info().rss


def test_a_reservation_left_open_keeps_the_tier_open() -> None:
    tier = RamTier(PAGE, populate=False)
    with tier.reserve(A, 10), pytest.raises(TierError, match="1 reservation"):
        tier.close()
    tier.close()
