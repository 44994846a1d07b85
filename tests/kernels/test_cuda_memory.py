"""How a card's memory calls the driver, on a driver of the test's own: no GPU is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from moet.base.errors import CopyError, KernelError
from moet.kernels.cuda import toolkit
from moet.kernels.cuda.memory import CudaMemory
from moet.tiers.memory import CardMemory


class Status(int):
    """As the bindings have it: a number with a name."""

    name: str

    def __new__(cls, value: int, name: str) -> Status:
        made = super().__new__(cls, value)
        made.name = name
        return made


OK, BAD = Status(0, "SUCCESS"), Status(2, "OUT_OF_MEMORY")
GLOBAL, RELAXED = "global", "relaxed"


class Driver:
    """Notes every call, with the context and the capture mode that it is made in."""

    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_BLOCKING_SYNC=1, CU_EVENT_DISABLE_TIMING=2)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=RELAXED)
    CU_MEMHOSTALLOC_PORTABLE = CU_MEMHOSTREGISTER_PORTABLE = 1
    CUstream = CUevent = int

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, str]] = []
        self.results: dict[str, tuple[Any, ...]] = {
            "cuMemGetInfo": (OK, 3, 4),
            "cuDeviceGet": (OK, 0),
            "cuDevicePrimaryCtxRetain": (OK, 5),
        }
        self._thread = threading.local()

    def cuCtxPushCurrent(self, context: int) -> tuple[Status]:  # noqa: N802 - the driver's name
        self._thread.depth = getattr(self._thread, "depth", 0) + 1
        return (OK,)

    def cuCtxPopCurrent(self) -> tuple[Status, int]:  # noqa: N802
        self._thread.depth -= 1
        return OK, 5

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[Status, str]:  # noqa: N802
        before = getattr(self._thread, "mode", GLOBAL)
        self._thread.mode = mode
        return OK, before

    @property
    def state(self) -> tuple[int, str]:
        return getattr(self._thread, "depth", 0), getattr(self._thread, "mode", GLOBAL)

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def function(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, *self.state))
            nothing = name.endswith(("Async", "Synchronize", "WaitEvent"))
            return self.results.get(name, (OK,) if nothing else (OK, 9))

        function.__name__ = name
        return function


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(toolkit, "driver", lambda: made)
    return made


CALLS: dict[str, Callable[[CardMemory], object]] = {
    "room": lambda m: m.room(),
    "allocate": lambda m: m.allocate(1),
    "free": lambda m: m.free(1),
    "pin": lambda m: m.pin(1),
    "unpin": lambda m: m.unpin(1),
    "register": lambda m: m.register(1, 1),
    "unregister": lambda m: m.unregister(1),
    "copy_in": lambda m: m.copy_in(1, 2, 3),
    "copy_out": lambda m: m.copy_out(1, 2, 3),
    "record": lambda m: m.record(1),
    "hold_copies": lambda m: m.hold_copies(1),
    "wait": lambda m: m.wait(1),
    "drop": lambda m: m.drop(1),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_made_in_our_context_and_harmless_to_captures(driver: Driver, name: str) -> None:
    memory = CudaMemory(0)
    driver.calls.clear()
    CALLS[name](memory)
    assert driver.calls
    assert all(state == (1, RELAXED) for _, *rest in driver.calls for state in [tuple(rest)])
    assert driver.state == (0, GLOBAL)


@pytest.mark.parametrize("name", CALLS)
def test_nothing_waits_for_the_whole_card(driver: Driver, name: str) -> None:
    memory = CudaMemory(0)
    driver.calls.clear()
    CALLS[name](memory)
    names = {call for call, *_ in driver.calls}
    assert not names & {"cuCtxSynchronize", "cuStreamSynchronize", "cuMemcpyHtoD", "cuMemcpyDtoH"}


@pytest.mark.parametrize("name", CALLS)
def test_no_call_is_made_during_a_pause(driver: Driver, name: str) -> None:
    memory = CudaMemory(0)
    driver.calls.clear()
    with memory.paused(), pytest.raises(KernelError, match="holds off itself"):
        CALLS[name](memory)
    assert driver.calls == []


def test_the_thread_is_left_as_it_was_after_an_error_too(driver: Driver) -> None:
    memory = CudaMemory(0)
    driver.results["cuMemAlloc"] = (BAD, 0)
    with pytest.raises(KernelError, match="cuMemAlloc failed: OUT_OF_MEMORY"):
        memory.allocate(1)
    assert driver.state == (0, GLOBAL)


def test_a_copy_that_does_not_start_leaves_no_event(driver: Driver) -> None:
    memory = CudaMemory(0)
    driver.calls.clear()
    driver.results["cuMemcpyHtoDAsync"] = (BAD,)
    with pytest.raises(KernelError, match="OUT_OF_MEMORY"):
        memory.copy_in(1, 2, 3)
    assert [name for name, *_ in driver.calls] == [
        "cuEventCreate", "cuMemcpyHtoDAsync", "cuEventDestroy"
    ]  # fmt: skip


@pytest.mark.parametrize("waiting", ["succeeds", "fails"])
def test_a_copy_without_an_event_behind_it_is_waited_for_or_astray(
    driver: Driver, waiting: str
) -> None:
    memory = CudaMemory(0)
    driver.calls.clear()
    driver.results["cuEventRecord"] = (BAD,)
    if waiting == "fails":
        driver.results["cuStreamSynchronize"] = (BAD,)
    with pytest.raises(KernelError, match="cuEventRecord failed") as caught:
        memory.copy_in(1, 2, 3)
    assert isinstance(caught.value, CopyError) == (waiting == "fails")
    assert [name for name, *_ in driver.calls] == [
        "cuEventCreate", "cuMemcpyHtoDAsync", "cuEventRecord", "cuStreamSynchronize",
        "cuEventDestroy",
    ]  # fmt: skip
