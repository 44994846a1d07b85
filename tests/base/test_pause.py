"""Calls and pauses exclude each other, and nobody waits for themselves."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor, TimeoutError

import pytest

from moet.base.errors import KernelError
from moet.base.pause import Pause

SOON = 10.0
"""Seconds after which something that should happen has not."""


def call(pause: Pause, log: list[str]) -> None:
    with pause.call(KernelError):
        log.append("call")


def test_a_call_waits_for_the_pause_to_end() -> None:
    pause, log = Pause(), list[str]()
    with ThreadPoolExecutor() as pool:
        with pause.held():
            done = pool.submit(call, pause, log)
            with pytest.raises(TimeoutError):
                done.result(timeout=0.05)
            log.append("pause")
        done.result(timeout=SOON)
    assert log == ["pause", "call"]


def test_a_pause_waits_for_calls_that_run_and_goes_before_new_ones() -> None:
    pause, log = Pause(), list[str]()
    running, end, asked = threading.Event(), threading.Event(), threading.Event()

    def long_call() -> None:
        with pause.call(KernelError):
            running.set()
            assert end.wait(SOON)
            log.append("long call")

    def hold() -> None:
        asked.set()
        with pause.held():
            log.append("pause")

    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(long_call)]
        assert running.wait(SOON)
        jobs.append(pool.submit(hold))
        assert asked.wait(SOON)
        while not pause._pausing:
            time.sleep(0.001)
        jobs.append(pool.submit(call, pause, log))
        end.set()
        for job in jobs:
            job.result(timeout=SOON)
    assert log == ["long call", "pause", "call"]


def test_a_thread_that_pauses_may_not_call() -> None:
    pause = Pause()
    with pause.held(), pytest.raises(KernelError, match="holds off itself") as caught:
        call(pause, [])
    assert caught.value.hint
    call(pause, [])


def test_pauses_overlap_and_calls_wait_for_the_last() -> None:
    pause, log = Pause(), list[str]()
    with ThreadPoolExecutor() as pool:
        with pause.held():
            with pause.held():
                done = pool.submit(call, pause, log)
            with pytest.raises(TimeoutError):
                done.result(timeout=0.05)
        done.result(timeout=SOON)
    assert log == ["call"]


def test_calls_end_in_errors_too() -> None:
    pause = Pause()
    with pytest.raises(ZeroDivisionError), pause.call(KernelError):
        raise ZeroDivisionError
    with pause.held():
        pass
