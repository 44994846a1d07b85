"""Goes through the records of a pack with several threads, each with memory of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from moet.machine.cpu import usable_threads

_MIN_THREADS, _MAX_THREADS = 4, 16  # below, a drive idles; above, memory grows for nothing
_BUFFER_BYTES = 192 << 20  # of all threads; a pack is written in half a gigabyte, whatever it holds
_TICK_S = 0.25

Work = Callable[[int], None]


def choose_threads(asked: int, buffer_bytes: int) -> int:
    """Threads for a sweep: as many as were asked for, or by the machine where 0 are.

    Args:
        asked: 0 or more.
        buffer_bytes: memory that one thread needs.
    """
    if asked:
        return asked
    room = max(1, _BUFFER_BYTES // buffer_bytes)
    return min(_MAX_THREADS, max(_MIN_THREADS, usable_threads()), room)


class Sweep:
    """One pass.

    Args:
        indices: of the records, in the order in which they are dealt out.
        threads: how many.
        worker: makes what a thread does with an index; called once in each thread.
    """

    def __init__(
        self, indices: Sequence[int], threads: int, worker: Callable[[], Work], name: str
    ) -> None:
        self._todo = deque(indices)
        self._threads = max(1, min(threads, len(indices)))
        self._worker = worker
        self._name = name
        self._stop = threading.Event()

    def _drain(self) -> None:
        work = self._worker()
        while not self._stop.is_set():
            try:
                index = self._todo.popleft()
            except IndexError:
                return
            work(index)

    def run(self, tick: Callable[[], None]) -> None:
        """Does it. The first error stops the others and is raised; so does an error of ``tick``.

        Args:
            tick: called from this thread a few times a second, and once at the end.
        """
        pool = ThreadPoolExecutor(self._threads, self._name)
        try:
            running: set[Future[None]] = {pool.submit(self._drain) for _ in range(self._threads)}
            while running:
                finished, running = wait(running, _TICK_S, FIRST_EXCEPTION)
                for future in finished:
                    future.result()
                tick()
        finally:
            self._stop.set()
            pool.shutdown(wait=True)
