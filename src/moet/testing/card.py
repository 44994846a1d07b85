"""A card made of host memory, for tests without one: as asynchronous as a real one, and stricter.

Copies are done later, by a thread, in order: whoever reads a record before its copy has landed, or
fills a buffer again while it is being copied, gets wrong bytes. What a real card forgives or
punishes by crashing is an error here: copies outside of allocated or page-locked memory, freeing
memory that a copy still needs, events that were dropped.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import CopyError, KernelError
from moet.base.pause import Pause

UNWRITTEN = 0xA5
"""What fresh memory of the card holds."""

_PATIENCE_S = 30.0


def _nothing_fails(operation: str) -> bool:
    del operation
    return False


def bytes_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Memory as it is, u8 [nbytes]; of the card or of the host."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


@dataclass
class _Job:
    """Something in a stream's queue; ``passed`` is its event."""

    to: int = 0
    source: int = 0
    nbytes: int = 0
    after: list[_Job] = field(default_factory=list)
    passed: threading.Event = field(default_factory=threading.Event)
    failed: bool = False


class HostCard:
    """A ``tiers.memory.CardMemory`` in host memory.

    Args:
        capacity: bytes of the card.
        fails: asked once for each operation, by its method's name, and for each copy once more as
            ``"astray"``, when it is queued, and as ``"landing"``, when it is done; True makes it
            fail.

    Attributes:
        calls: names of the methods called, in order.
    """

    def __init__(
        self, capacity: int = 1 << 30, fails: Callable[[str], bool] = _nothing_fails
    ) -> None:
        self._capacity = capacity
        self._fails = fails
        self._pause = Pause()
        self._changed = threading.Condition()
        self._blocks: dict[int, mmap.mmap] = {}
        self._sizes: dict[int, int] = {}
        self._locked: dict[int, int] = {}
        self._events: dict[int, _Job] = {}
        self._numbers = itertools.count(1)
        self._copies: deque[_Job] = deque()
        self._held: list[_Job] = []
        self._stalled = self._ending = False
        self.calls: list[str] = []
        self._worker = threading.Thread(target=self._work, name="host-card", daemon=True)
        self._worker.start()

    def paused(self) -> AbstractContextManager[None]:
        """See ``CardMemory``."""
        return self._pause.held()

    @contextmanager
    def _entered(self, operation: str) -> Iterator[None]:
        """A call: not during a pause; fails where the plan says so."""
        with self._pause.call(KernelError), self._changed:
            self._begin(operation)
            yield
            self._changed.notify_all()

    def _begin(self, operation: str) -> None:
        self.calls.append(operation)
        if self._fails(operation):
            raise KernelError(f"{operation} failed on purpose", hint="this is a test")

    # ---- memory

    def room(self) -> tuple[int, int]:
        """Free and total bytes of the card."""
        with self._entered("room"):
            return self._capacity - sum(self._sizes.values()), self._capacity

    def allocate(self, nbytes: int) -> int:
        """Memory of the card, deliberately not page-aligned."""
        with self._entered("allocate"):
            if nbytes > self._capacity - sum(self._sizes.values()):
                raise KernelError("out of memory", hint="this is a test")
            address = self._map(nbytes + 256) + 256
            self._sizes[address] = nbytes
            bytes_at(address, nbytes)[:] = UNWRITTEN
            return address

    def _map(self, nbytes: int) -> int:
        block = mmap.mmap(-1, nbytes)
        address = int(np.frombuffer(block, np.uint8).ctypes.data)
        self._blocks[address] = block
        return address

    def free(self, address: int) -> None:
        """Gives memory of ``allocate`` back."""
        with self._entered("free"):
            self._check_idle(address, self._sizes.pop(address))
            del self._blocks[address - 256]

    def pin(self, nbytes: int) -> int:
        """Page-locked host memory."""
        with self._entered("pin"):
            address = self._map(nbytes)
            self._locked[address] = nbytes
            return address

    def unpin(self, address: int) -> None:
        """Gives memory of ``pin`` back."""
        with self._entered("unpin"):
            self._check_idle(address, self._locked.pop(address))
            del self._blocks[address]

    def register(self, address: int, nbytes: int) -> None:
        """Page-locks host memory."""
        with self._entered("register"):
            self._locked[address] = nbytes

    def unregister(self, address: int) -> None:
        """Ends ``register``."""
        with self._entered("unregister"):
            self._check_idle(address, self._locked.pop(address))

    def _check_idle(self, address: int, nbytes: int) -> None:
        busy = range(address, address + nbytes)
        if any(job.nbytes and (job.to in busy or job.source in busy) for job in self._copies):
            raise KernelError("memory is given back while a copy needs it", hint="a bug of ours")

    # ---- copies

    def copy_in(self, to: int, source: int, nbytes: int) -> int:
        """Queues a copy from page-locked memory."""
        with self._entered("copy_in"):
            _check_inside(self._sizes, to, nbytes, "of the card")
            _check_inside(self._locked, source, nbytes, "page-locked")
            job = _Job(to, source, nbytes, self._held)
            self._copies.append(job)
            if self._fails("astray"):
                raise CopyError("the copy went astray on purpose", hint="this is a test")
            return self._remember(job)

    def copy_out(self, to: int, source: int, nbytes: int) -> None:
        """Copies back, behind the copies that are queued."""
        with self._pause.call(KernelError):
            with self._changed:
                self._begin("copy_out")
                _check_inside(self._sizes, source, nbytes, "of the card")
                job = _Job(to, source, nbytes, self._held)
                self._copies.append(job)
                self._changed.notify_all()
            _wait_for(job)

    def _remember(self, job: _Job) -> int:
        number = next(self._numbers)
        self._events[number] = job
        return number

    def _work(self) -> None:
        """The copy engine: one job after the other, each only when nothing holds it off."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ending or self._may_start())
                if self._ending:
                    return
                job = self._copies[0]
                landed = not self._fails("landing")
            if landed:
                # Half and half, so that whoever looks too early may see a torn record.
                half = job.nbytes // 2
                ctypes.memmove(job.to, job.source, half)
                ctypes.memmove(job.to + half, job.source + half, job.nbytes - half)
            with self._changed:
                job.failed = not landed
                self._copies.popleft()
                job.passed.set()

    def _may_start(self) -> bool:
        if self._stalled or not self._copies:
            return False
        return all(job.passed.is_set() for job in self._copies[0].after)

    # ---- events

    def record(self, stream: int) -> int:
        """The point of a stream of the test's own; ``finish`` passes it."""
        del stream
        with self._entered("record"):
            return self._remember(_Job())

    def finish(self, event: int) -> None:
        """The work behind ``record``'s event has ended."""
        with self._changed:
            self._events[event].passed.set()
            self._changed.notify_all()

    def hold_copies(self, event: int) -> None:
        """Copies that are queued from now on begin after the event."""
        with self._entered("hold_copies"):
            self._held = [*self._held, self._events[event]]

    def wait(self, event: int) -> None:
        """Waits for an event; one whose copy failed raises."""
        with self._pause.call(KernelError):
            with self._changed:
                self._begin("wait")
                job = self._events[event]
            _wait_for(job)

    def drop(self, event: int) -> None:
        """Forgets an event."""
        with self._entered("drop"):
            del self._events[event]

    # ---- what tests do

    def done(self, event: int) -> bool:
        """Whether the event has passed."""
        with self._changed:
            return self._events[event].passed.is_set()

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Inside, no copy begins."""
        with self._changed:
            self._stalled = True
        try:
            yield
        finally:
            with self._changed:
                self._stalled = False
                self._changed.notify_all()

    def wait_for_copies(self, count: int) -> None:
        """Returns when so many copies are queued."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._copies) >= count, _PATIENCE_S)

    @property
    def left(self) -> tuple[int, int, int]:
        """Blocks of the card, page-locked blocks and events that nobody has given back."""
        with self._changed:
            return len(self._sizes), len(self._locked), len(self._events)

    def close(self) -> None:
        """Ends the copy engine."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._worker.join(_PATIENCE_S)


def _wait_for(job: _Job) -> None:
    if not job.passed.wait(_PATIENCE_S):
        raise KernelError("a copy never ended", hint="is the card stalled?")
    if job.failed:
        raise KernelError("the copy failed on purpose", hint="this is a test")


def _check_inside(blocks: dict[int, int], address: int, nbytes: int, what: str) -> None:
    if not any(at <= address and address + nbytes <= at + size for at, size in blocks.items()):
        raise KernelError(f"{nbytes} bytes at {address:#x} are not {what}", hint="a bug of ours")
