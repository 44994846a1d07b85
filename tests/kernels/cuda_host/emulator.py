"""A card that the CPU stands in for: the CUDA sources themselves, compiled for the host.

Blocks run one by one. What it does not have: concurrency between kernels, and a memory model that
is weaker than the CPU's.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import moet.kernels.cuda as cuda_room
from moet.kernels.cuda.params import Params
from moet.kernels.cuda.plan import Card
from moet.testing.card import HostCard
from moet.verify.cases import aligned_bytes

HERE = Path(__file__).parent
DEVICE = Path(cuda_room.__file__).parent / "device"
FLAGS = ["-std=c++20", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]

CARD = Card(
    name="a small card",
    capability=(9, 0),
    multiprocessors=3,
    shared_per_block=232448,
    shared_per_multiprocessor=233472,
)

Array = NDArray[Any]


_BUILT: list[ctypes.CDLL] = []


def build_library(folder: Path) -> ctypes.CDLL:
    """Compiles the kernels for the host, once a process; skips the test where there is no compiler.

    The library knows nothing between two launches, so all tests can have the same one."""
    if _BUILT:
        return _BUILT[0]
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    out = folder / "kernels.so"
    include = [f"-I{HERE}", f"-I{DEVICE}"]
    command = [compiler, *FLAGS, "-shared", "-fPIC", "-DMOET_HOST", *include]
    subprocess.run([*command, str(HERE / "runner.cpp"), "-o", str(out)], check=True)
    _BUILT.append(ctypes.CDLL(str(out)))
    return _BUILT[0]


class HostLauncher:
    def __init__(self, library: ctypes.CDLL, lazy: bool, reverse: bool) -> None:
        self.library, self.lazy, self.reverse = library, lazy, reverse
        self.launched: list[str] = []
        self.recording: list[Callable[[], None]] | None = None

    def launch(
        self,
        kernel: str,
        params: Params,
        *,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        overlap: bool,
    ) -> None:
        self.launched.append(kernel)
        held = type(params).from_buffer_copy(params)  # the caller may use its own again

        def run() -> None:
            status = self.library.moet_host_launch(
                kernel.encode(), ctypes.byref(held), *grid, threads, shared_bytes, self.lazy,
                self.reverse,
            )  # fmt: skip
            assert status == 0, kernel

        self.later(run)

    def later(self, work: Callable[[], None]) -> None:
        """Does the work now, or in each replay of the graph that is being captured."""
        if self.recording is None:
            work()
        else:
            self.recording.append(work)


class HostGpu(HostLauncher):
    """Stands in for `Gpu`, so that the exam and the bench that run on cards are themselves run."""

    card = CARD

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library, lazy=True, reverse=False)
        self.held: dict[int, Array] = {}
        self.broken = False

    def allocate(self, nbytes: int) -> int:
        memory = aligned_bytes(nbytes)
        self.held[memory.ctypes.data] = memory
        return memory.ctypes.data

    def free(self, address: int) -> None:
        del self.held[address]

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        ctypes.memset(address, byte, nbytes)

    def upload(self, address: int, data: Array) -> None:
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def download(self, data: Array, address: int) -> None:
        ctypes.memmove(data.ctypes.data, address, data.nbytes)
        if self.broken:
            data.view(np.uint8).reshape(-1)[-1] ^= 1

    def copy(self, to: int, source: int, nbytes: int) -> None:
        ctypes.memmove(to, source, nbytes)

    def stream(self) -> int:
        return 1

    def synchronise(self) -> None:
        pass

    def capture(self, stream: int, work: Callable[[], None]) -> HostGraph:
        self.recording = steps = []
        try:
            work()
        finally:
            self.recording = None
        return HostGraph(steps)

    def milliseconds(self, stream: int, work: Callable[[], None]) -> float:
        start = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - start)

    def laps(
        self,
        stream: int,
        count: int,
        prepare: Callable[[int], None],
        work: Callable[[int], None],
    ) -> list[float]:
        times = []
        for i in range(count):
            prepare(i)
            times.append(self.milliseconds(stream, lambda i=i: work(i)))  # type: ignore[misc]
        return times

    def read(self, address: int, nbytes: int, sink: int, stream: int) -> None:
        self.later(lambda: ctypes.memmove(sink, address, 64) and None)

    def registers(self, kernel: str) -> int:
        return 1


class HostGraph:
    def __init__(self, steps: list[Callable[[], None]]) -> None:
        self.steps = steps

    def replay(self) -> None:
        for step in self.steps:
            step()

    def close(self) -> None:
        pass


class HostLink:
    """The host link of `HostGpu`: one address space, one thread, everything at once.

    A host function runs where it is enqueued, and a wait for a word spins: both need the other side
    to be a real thread, as it is."""

    def __init__(self, card: HostGpu) -> None:
        self.card = card
        self.words: list[int] = []

    def pinned(self, nbytes: int) -> int:
        return self.card.allocate(nbytes)

    def free_pinned(self, address: int) -> None:
        self.card.free(address)

    def upload_async(self, address: int, source: int, nbytes: int, stream: int) -> None:
        self.card.later(lambda: ctypes.memmove(address, source, nbytes) and None)

    def capturing(self, stream: int) -> bool:
        return self.card.recording is not None

    def event(self) -> object:
        return object()

    def free_event(self, event: object) -> None:
        pass

    def follow(self, stream: int, leader: int, event: object) -> None:
        pass

    def wait_for_word(self, stream: int, address: int, value: int) -> None:
        def wait() -> None:
            self.words.append(address)
            end = time.monotonic() + 20
            while ctypes.c_uint32.from_address(address).value != value:
                assert time.monotonic() < end, "nobody opens the gate"
                time.sleep(0)

        self.card.later(wait)

    def host_function(self, stream: int, function: int, data: int) -> None:
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        self.card.later(lambda: call(data))


def instant_card() -> HostCard:
    """A `HostCard` for the uploads of `HostGpu`, whose streams have always ended: the points that
    are recorded in them have passed at once."""
    memory = HostCard()
    record = memory.record

    def passed(stream: int) -> int:
        event = record(stream)
        memory.finish(event)
        return event

    memory.record = passed  # type: ignore[method-assign]
    return memory
