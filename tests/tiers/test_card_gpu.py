"""The card tier on a real card: the conformance suite, fences, and captures of other threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from numpy.typing import NDArray

from moet.base.errors import KernelError, MachineError, TierError
from moet.kernels.cuda import toolkit
from moet.kernels.cuda.memory import CudaMemory
from moet.testing.tiers import PAGE, A, B, TierConformance, TierMachine, pattern
from moet.tiers.api import ExpertKey, Lease, Tier
from moet.tiers.card import CardTier
from moet.tiers.ram import RamTier

SOON = 20.0
"""Seconds after which something that should happen has not."""


def find_card() -> tuple[CudaMemory, CudaMemory] | str:
    """A card's memory, and once more with a copy stream of its own to look past the tier; or why
    there is none."""
    try:
        return CudaMemory(0), CudaMemory(0)
    except (MachineError, KernelError) as error:
        return f"no GPU that can be used: {error}"


FOUND = find_card()
pytestmark = pytest.mark.skipif(isinstance(FOUND, str), reason=str(FOUND))
MEMORY, SPY = (FOUND, FOUND) if isinstance(FOUND, str) else FOUND


def look(lease: Lease) -> NDArray[np.uint8]:
    """The card's bytes now, not behind the tier's copies."""
    data = np.empty(lease.nbytes, np.uint8)
    SPY.copy_out(data.ctypes.data, lease.address, lease.nbytes)
    return data


class TestCardTierOnACard(TierConformance):
    def make_tier(self, capacity: int) -> Tier:
        return CardTier(MEMORY, capacity, record_bytes=capacity, staging=3)

    def memory_at(self, lease: Lease) -> NDArray[np.uint8]:
        return look(lease)


class CardMachine(TierMachine):
    def make_tier(self, capacity: int) -> Tier:
        return CardTier(MEMORY, capacity, record_bytes=3 * PAGE, staging=2)

    def memory_at(self, lease: Lease) -> NDArray[np.uint8]:
        return look(lease)


TestCardMachineOnACard = CardMachine.TestCase
TestCardMachineOnACard.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)

RECORDS, RECORD_BYTES = 24, 2 << 20


@pytest.fixture
def ram() -> Iterator[RamTier]:
    tier = RamTier(RECORDS * RECORD_BYTES)
    for e in range(RECORDS):
        tier.put(ExpertKey(0, e), pattern(ExpertKey(0, e), RECORD_BYTES))
    yield tier
    tier.close()


@pytest.fixture
def card() -> Iterator[CardTier]:
    tier = CardTier(MEMORY, RECORDS * RECORD_BYTES, record_bytes=RECORD_BYTES)
    yield tier
    tier.close()


def upload(ram: RamTier, card: CardTier, experts: range) -> int:
    leases = [ram.acquire(ExpertKey(0, e)) for e in experts]
    try:
        return card.upload(leases)
    finally:
        for lease in leases:
            lease.release()


def assert_whole(card: CardTier, count: int) -> None:
    keys = list(card.keys())
    assert len(keys) == count
    for key in keys:
        with card.acquire(key) as lease:
            assert np.array_equal(look(lease), pattern(key, RECORD_BYTES))


@pytest.mark.parametrize("direct", [False, True])
def test_uploads_of_several_threads_keep_every_byte(
    ram: RamTier, card: CardTier, direct: bool
) -> None:
    if direct:
        card.register_host(ram.address_of(0), ram.capacity)
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(upload, ram, card, range(i, RECORDS, 3)) for i in range(3)]
        assert sum(job.result(timeout=SOON) for job in jobs) == RECORDS * RECORD_BYTES
    assert (card.direct_bytes > 0, card.staged_bytes > 0) == (direct, not direct)
    assert_whole(card, RECORDS)


def test_more_than_the_card_has_is_refused_with_the_numbers() -> None:
    free, _ = MEMORY.room()
    with pytest.raises(TierError, match=r"OUT_OF_MEMORY.*GiB of .* GiB are free") as caught:
        CardTier(MEMORY, free + (1 << 30), record_bytes=PAGE)
    assert caught.value.hint


# ---- streams of others


def call(name: str, *args: Any) -> Any:
    return toolkit.call(getattr(toolkit.driver(), name), *args)


@contextmanager
def context() -> Iterator[None]:
    """The card's context, current in this thread."""
    call("cuCtxPushCurrent", MEMORY._context)
    try:
        yield
    finally:
        call("cuCtxPopCurrent")


@contextmanager
def a_stream() -> Iterator[Any]:
    with context():
        stream = call("cuStreamCreate", 1)
        yield stream
        call("cuStreamDestroy", stream)


def test_a_fence_holds_off_the_next_copy_until_the_step_has_ended() -> None:
    """The step waits for a word in pinned memory, so that the test decides when it ends."""
    tier = CardTier(MEMORY, PAGE, record_bytes=PAGE)
    word = MEMORY.pin(PAGE)
    ctypes.c_uint32.from_address(word).value = 0
    with a_stream() as stream, ThreadPoolExecutor(1) as pool:
        tier.put(A, pattern(A, PAGE))
        call("cuStreamWaitValue32", stream, word, 1, 0)  # until >= 1
        step = MEMORY.record(int(stream))
        tier.evict(A, fence=step)
        done = pool.submit(tier.put, B, pattern(B, PAGE))
        try:
            with pytest.raises(TimeoutError):
                done.result(timeout=0.2)
            with pytest.raises(KernelError, match="NOT_READY"):
                call("cuEventQuery", step)
        finally:
            ctypes.c_uint32.from_address(word).value = 1
        done.result(timeout=SOON)
        call("cuEventQuery", step)
        MEMORY.drop(step)
    with tier.acquire(B) as lease:
        assert np.array_equal(look(lease), pattern(B, PAGE))
    tier.close()
    MEMORY.unpin(word)


def captured(stream: Any, meanwhile: Callable[[], object]) -> Any:
    """A graph of one memset, captured in mode "global" while another thread does something."""
    target = MEMORY.allocate(PAGE)
    try:
        with ThreadPoolExecutor(1) as pool:
            call("cuStreamBeginCapture", stream, 0)
            try:
                call("cuMemsetD8Async", target, 7, PAGE, stream)
                pool.submit(meanwhile).result(timeout=SOON)
            finally:
                graph = call("cuStreamEndCapture", stream)
        executable = call("cuGraphInstantiate", graph, 0)
        call("cuGraphLaunch", executable, stream)
        call("cuStreamSynchronize", stream)
        data = np.empty(PAGE, np.uint8)
        SPY.copy_out(data.ctypes.data, target, PAGE)
        assert set(data) == {7}
    finally:
        MEMORY.free(target)


def test_uploads_do_not_spoil_a_capture_of_another_thread(ram: RamTier) -> None:
    def all_of_a_tier() -> None:
        card = CardTier(MEMORY, RECORDS * RECORD_BYTES, record_bytes=RECORD_BYTES)
        upload(ram, card, range(8))
        card.register_host(ram.address_of(0), ram.capacity)
        upload(ram, card, range(8, RECORDS))
        assert_whole(card, RECORDS)
        card.close()

    with a_stream() as stream:
        captured(stream, all_of_a_tier)


def test_without_the_mode_a_capture_is_spoilt() -> None:
    """The control of the test above."""

    def allocate() -> None:
        with context():
            call("cuMemAlloc", PAGE)

    with a_stream() as stream, pytest.raises(KernelError, match="CAPTURE"):
        captured(stream, allocate)


def test_uploads_wait_while_they_are_paused(ram: RamTier, card: CardTier) -> None:
    with ThreadPoolExecutor(1) as pool:
        with MEMORY.paused():
            done = pool.submit(upload, ram, card, range(RECORDS))
            with pytest.raises(TimeoutError):
                done.result(timeout=0.2)
            with pytest.raises(KernelError, match="holds off itself"):
                MEMORY.room()
        done.result(timeout=SOON)
    assert_whole(card, RECORDS)
