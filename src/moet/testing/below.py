"""Records that come late, in any order or not at all: what a cascade reads from, made of memory.

Stricter than a disk: the place of a read holds other bytes until it is done, two reads into one
place at once are an error, and so is memory that goes while it is registered.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import TierError
from moet.base.report import Finding, Level
from moet.tiers.api import RECORD_ALIGNMENT, ExpertKey
from moet.tiers.fetch import Arrival

UNREAD = 0x5A
"""What the place of a read holds until it is done."""

Fails = Callable[[ExpertKey], bool]


def nothing_fails(key: ExpertKey) -> bool:
    """Every read ends well."""
    del key
    return False


class _Read:
    def __init__(self, key: ExpertKey, address: int, urgent: bool) -> None:
        self.key, self.address, self.urgent = key, address, urgent
        self.future: Future[Arrival] = Future()


class MemoryBelow:
    """A ``tiers.below.Below``.

    Args:
        records: what there is, u8 [nbytes] each.
        fails: asked when a read ends; True makes it fail.
        held: reads end only by ``finish``; otherwise before ``read_many`` returns.

    Attributes:
        log: every read that was started: its key, and whether it was urgent.
        registered: address and size of memory that is registered now.
    """

    def __init__(
        self,
        records: Mapping[ExpertKey, NDArray[np.uint8]],
        fails: Fails = nothing_fails,
        *,
        held: bool = False,
    ) -> None:
        self.records = dict(records)
        self.fails = fails
        self.held = held
        self.log: list[tuple[ExpertKey, bool]] = []
        self.registered: dict[int, int] = {}
        self._lock = threading.Lock()
        self._flying: list[_Read] = []

    def keys(self) -> Iterator[ExpertKey]:
        """See ``Below``."""
        return iter(self.records)

    def nbytes(self, key: ExpertKey) -> int:
        """See ``Below``."""
        return self.records[key].size

    def read_many(
        self, wanted: Iterable[tuple[ExpertKey, int]], *, urgent: bool = True
    ) -> list[Future[Arrival]]:
        """See ``Below``."""
        reads = [_Read(key, address, urgent) for key, address in wanted]
        with self._lock:
            for read in reads:
                self._start(read)
        if not self.held:
            for read in reads:
                self._end(read)
        return [read.future for read in reads]

    def _start(self, read: _Read) -> None:
        if read.address % RECORD_ALIGNMENT:
            raise TierError(f"{read.key} to {read.address:#x}", hint="this is a test")
        if any(other.address == read.address for other in self._flying):
            raise TierError(f"two reads to {read.address:#x} at once", hint="this is a test")
        ctypes.memset(read.address, UNREAD, self.records[read.key].size)
        self.log.append((read.key, read.urgent))
        self._flying.append(read)

    def _end(self, read: _Read) -> None:
        data = self.records[read.key]
        with self._lock:
            self._flying.remove(read)
        if self.fails(read.key):
            what = f"expert {read.key.expert} of layer {read.key.layer} failed on purpose"
            read.future.set_exception(TierError(what, hint="this is a test"))
            return
        ctypes.memmove(read.address, data.ctypes.data, data.size)
        read.future.set_result(Arrival(read.key, data.size, False, 1, 0.0))

    @property
    def flying(self) -> list[ExpertKey]:
        """Keys of the reads that have not ended, in the order in which they began."""
        with self._lock:
            return [read.key for read in self._flying]

    def finish(self, *keys: ExpertKey) -> None:
        """Ends the reads of these keys, in this order; of all of them without any."""
        with self._lock:
            chosen = [r for key in keys for r in self._flying if r.key == key]
            ending = chosen if keys else list(self._flying)
        for read in ending:
            self._end(read)

    def finish_one(self, rng: random.Random) -> bool:
        """Ends any read; False where there is none."""
        with self._lock:
            if not self._flying:
                return False
            read = rng.choice(self._flying)
        self._end(read)
        return True

    def register(self, address: int, nbytes: int) -> Finding:
        """See ``Below``."""
        self.registered[address] = nbytes
        return Finding(level=Level.OK, topic="disk buffers", fact=f"{nbytes} bytes registered")

    def unregister(self, address: int) -> None:
        """See ``Below``."""
        del self.registered[address]


class Finisher:
    """A thread that ends the reads of a held ``MemoryBelow`` in random order, as disks do.

    Use it in a ``with`` block.
    """

    def __init__(self, below: MemoryBelow, seed: int = 0) -> None:
        self._below = below
        self._rng = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="finisher", daemon=True)

    def _work(self) -> None:
        while not self._over.is_set():
            if not self._below.finish_one(self._rng):
                self._over.wait(0.0002)
        while self._below.finish_one(self._rng):
            pass

    def __enter__(self) -> Finisher:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
