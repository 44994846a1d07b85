"""The thread pool: every item once, phases in order, sleep when idle, errors instead of hangs."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet import _core
from moet.base.errors import KernelError
from moet.kernels.cpu import Pool, default_cpus

CPUS = default_cpus()
MXCSR = 0x1F80
FOREVER = -1


def exam(pool: Pool, slots: int, items: int, spin: int = 0, throw_at: int = -1) -> dict[str, Any]:
    return dict(_core.exam_pool(pool.core, slots, items, spin, throw_at))


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.002)


def task(thread: int, name: str) -> str:
    return Path(f"/proc/self/task/{thread}/{name}").read_text()


def sleeps(thread: int) -> bool:
    return task(thread, "stat").rpartition(")")[2].split()[0] == "S"


@pytest.fixture(scope="module")
def pools() -> dict[int, Pool]:
    return {threads: Pool(threads, CPUS) for threads in (1, 2, 3, 7)}


@settings(max_examples=40, deadline=None)
@given(
    threads=st.sampled_from([1, 2, 3, 7]),
    slots=st.integers(0, 40),
    items=st.integers(1, 60),
    spin=st.sampled_from([0, 300]),
)
def test_every_item_runs_once_and_phases_keep_their_order(
    pools: dict[int, Pool], threads: int, slots: int, items: int, spin: int
) -> None:
    report = exam(pools[threads], slots, items, spin)
    assert report["done"] == [1] * (slots * 2 * items)
    assert not report["early"]
    assert sum(report["by_worker"]) == slots * 2 * items
    seen = [m for m, n in zip(report["mxcsr"], report["by_worker"], strict=True) if n]
    assert set(seen) <= {MXCSR}


def test_most_slots_and_most_items(pools: dict[int, Pool]) -> None:
    assert set(exam(pools[2], 4096, 1)["done"]) == {1}
    assert set(exam(pools[2], 1, 65535)["done"]) == {1}
    with pytest.raises(_core.Refusal, match="65536"):
        exam(pools[2], 1, 65536)


def test_an_exception_reaches_the_caller_and_the_pool_lives_on(pools: dict[int, Pool]) -> None:
    for throw_at in (0, 5, 99):
        with pytest.raises(RuntimeError, match=f"item {throw_at} failed on purpose"):
            exam(pools[3], 10, 10, 0, throw_at)
    assert set(exam(pools[3], 10, 10)["done"]) == {1}


def test_workers_pin_themselves_to_the_given_cpus() -> None:
    pool = Pool(len(CPUS) + 1, CPUS)
    for worker, thread in enumerate(pool.core.thread_ids, start=1):
        line = next(s for s in task(thread, "status").splitlines() if "Cpus_allowed_list" in s)
        assert line.split()[1] == str(pool.cpus[worker % len(CPUS)])


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_a_pinned_caller_keeps_its_cpu_to_itself() -> None:
    made = []

    def pinned() -> None:
        os.sched_setaffinity(0, {CPUS[1]})
        made.append(Pool(2, CPUS))

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    assert made[0].cpus[0] == CPUS[1]
    allowed = task(made[0].core.thread_ids[0], "status")
    assert f"Cpus_allowed_list:\t{CPUS[0]}\n" in allowed


def test_idle_workers_sleep() -> None:
    pool = Pool(3, CPUS)
    exam(pool, 8, 100, 1000)

    def time_on_cpu() -> list[int]:
        return [int(task(t, "schedstat").split()[0]) for t in pool.core.thread_ids]

    wait_until(lambda: all(sleeps(t) for t in pool.core.thread_ids), "sleep")
    before = time_on_cpu()
    time.sleep(0.2)
    assert time_on_cpu() == before


def test_a_stalled_worker_holds_only_what_it_claimed() -> None:
    pool = Pool(2, CPUS)
    slots, items = 6, 50
    _core.exam_stall(pool.core, -1, FOREVER)
    reports: list[dict[str, Any]] = []
    caller = threading.Thread(target=lambda: reports.append(exam(pool, slots, items)))
    caller.start()
    # One of the two sits in its item; both asleep means that the other has run dry.
    threads = [pool.core.thread_ids[0], caller.native_id or 0]
    calm = 0
    while calm < 50:
        calm = calm + 1 if pool.heartbeat % 2 and all(map(sleeps, threads)) else 0
        time.sleep(0.002)
    _core.exam_release(pool.core)
    caller.join()
    assert set(reports[0]["done"]) == {1}
    assert not reports[0]["early"]
    # Left to the stalled one: its item, and its share of that slot's second phase.
    assert min(reports[0]["by_worker"]) <= 1 + items


def test_a_second_step_at_the_same_time_is_refused() -> None:
    pool = Pool(2, CPUS)
    _core.exam_stall(pool.core, -1, FOREVER)
    thread = threading.Thread(target=exam, args=(pool, 2, 10))
    thread.start()
    wait_until(lambda: pool.heartbeat % 2 == 1, "the step")
    with pytest.raises(_core.Refusal, match="already running a step"):
        exam(pool, 1, 1)
    with pytest.raises(KernelError, match="already running a step"):
        pool.set_heartbeat(0)
    _core.exam_release(pool.core)
    thread.join()
    assert set(exam(pool, 1, 1)["done"]) == {1}


def test_steps_may_come_from_different_threads(pools: dict[int, Pool]) -> None:
    reports: list[dict[str, Any]] = []
    for _ in range(5):
        thread = threading.Thread(target=lambda: reports.append(exam(pools[2], 4, 20)))
        thread.start()
        thread.join()
    assert all(set(r["done"]) == {1} for r in reports)
    assert len(reports) == 5


def test_heartbeat_counts_beginnings_and_ends() -> None:
    pool = Pool(2, CPUS)
    assert pool.heartbeat == 0
    exam(pool, 2, 2)
    assert pool.heartbeat == 2
    counter = ctypes.c_uint64(77)
    pool.set_heartbeat(ctypes.addressof(counter))
    assert counter.value == 2
    exam(pool, 2, 2)
    assert counter.value == pool.heartbeat == 4
    with pytest.raises(RuntimeError, match="on purpose"):
        exam(pool, 2, 2, 0, 0)
    assert counter.value == 6  # even: nothing is in flight after a failed step either
    pool.set_heartbeat(0)
    exam(pool, 2, 2)
    assert (counter.value, pool.heartbeat) == (6, 8)
    with pytest.raises(KernelError, match="8-byte boundary"):
        pool.set_heartbeat(ctypes.addressof(counter) + 4)


def test_a_forked_child_gets_an_error_not_a_hang() -> None:
    pool = Pool(2, CPUS)
    exam(pool, 2, 2)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            exam(pool, 2, 2)
        except _core.Refusal as refusal:
            code = 0 if "before a fork" in str(refusal) else 2
        del pool
        gc.collect()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert set(exam(pool, 2, 2)["done"]) == {1}


def test_pools_come_and_go() -> None:
    before = len(os.listdir("/proc/self/task"))
    for threads in (1, 2, 5) * 20:
        assert set(exam(Pool(threads, CPUS), 3, 3)["done"]) == {1}
    wait_until(lambda: len(os.listdir("/proc/self/task")) == before, "the end of the threads")


def test_a_pool_dies_with_a_stall_armed() -> None:
    pool = Pool(2, CPUS)
    _core.exam_stall(pool.core, 1, FOREVER)
    before = time.monotonic()
    del pool
    gc.collect()
    assert time.monotonic() - before < 30


@pytest.mark.parametrize(
    ("threads", "cpus", "message"),
    [
        (-1, CPUS, "-1 threads"),
        (5000, CPUS, "5000 threads"),
        (2, (), "without CPUs"),
        (2, (-3,), "no CPU"),
        (2, (100_000,), "no CPU"),
        (2, (1023,), "cannot run on CPU 1023"),
    ],
)
def test_impossible_pools_are_refused(threads: int, cpus: tuple[int, ...], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        Pool(threads, cpus)


def test_default_threads_fit_the_machine() -> None:
    pool = Pool()
    assert 1 <= pool.threads <= len(CPUS)
    assert sorted(pool.cpus) == sorted(os.sched_getaffinity(0))


def test_exams_refuse_workers_that_are_not_there() -> None:
    with pytest.raises(_core.Refusal, match="no worker 2"):
        _core.exam_stall(Pool(2, CPUS).core, 2, 1)


def test_workers_take_no_signals_but_their_own_faults() -> None:
    pool = Pool(2, CPUS)
    status = task(pool.core.thread_ids[0], "status")
    blocked = int(next(s for s in status.splitlines() if s.startswith("SigBlk:")).split()[1], 16)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM):
        assert blocked >> (number - 1) & 1
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT):
        assert not blocked >> (number - 1) & 1
