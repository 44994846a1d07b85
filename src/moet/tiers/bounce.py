"""Buffers for records that are put together on arrival: aligned, reused, never too many."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from moet.tiers.source import Bytes

Use = Callable[[Bytes | None], None]


class Bounce:
    """Lends buffers within a budget; whoever comes too late is called when there is room again.

    Args:
        budget: bytes that may be lent at once. One buffer is lent however large it is.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._lent = 0
        self._free: list[Bytes] = []
        self._queue: deque[tuple[int, Use]] = deque()
        self._closed = False

    def ask(self, nbytes: int, use: Use) -> None:
        """Calls ``use`` with a page-aligned buffer of at least so many bytes, now or from ``give``;
        with None once closed. A buffer goes back by ``give``."""
        with self._lock:
            self._queue.append((nbytes, use))
        self._lend()

    def give(self, buffer: Bytes) -> None:
        """Takes a buffer back."""
        with self._lock:
            self._lent -= buffer.size
            if not self._closed:
                self._free.append(buffer)
        self._lend()

    def close(self) -> None:
        """Turns away those that wait, and all that come; frees what is not lent."""
        with self._lock:
            self._closed = True
            self._free.clear()
        self._lend()

    def _lend(self) -> None:
        """Serves those that wait, first come first served; outside of the lock."""
        while True:
            with self._lock:
                if not self._queue:
                    return
                nbytes, use = self._queue[0]
                buffer = None if self._closed else self._take(nbytes)
                if buffer is None and not self._closed:
                    return
                self._queue.popleft()
            use(buffer)

    def _take(self, nbytes: int) -> Bytes | None:
        if self._lent and self._lent + nbytes > self._budget:
            return None
        fitting = [b for b in self._free if b.size >= nbytes]
        buffer = min(fitting, key=lambda b: b.size, default=None)
        if buffer is not None:
            self._free = [b for b in self._free if b is not buffer]
        else:
            self._free.clear()  # of other sizes: they would only pile up
            buffer = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self._lent += buffer.size
        return buffer
