"""The heartbeat page of a server: a small file that its processes map and none has to answer for.

The supervisor creates it, every worker counts its steps in it (the counter is a bare address that
the thread pool increments), the API server reads the counters and writes how far it is. A process
that is stopped, stuck or gone cannot lie here: its counter stands still.

Layout, little-endian u64 words. One 64-byte line a writer, so that nobody shares a cache line:

    line 0        magic, phase, beat of the API server's event loop, pid of the supervisor
    line 1 + r    of worker rank r: beat, bytes loaded, bytes to load, pid
    byte 4096     u32 length, then message, zero byte, hint: why the server failed, for the user
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

from moet.base.errors import EngineError, MoetError

MAGIC = int.from_bytes(b"MOETRUN1", "little")
LINE_WORDS = 8
MAX_RANKS = 63
TEXT_AT = 4096
PAGE_BYTES = 8192

_kept: list[mmap.mmap] = []  # native code counts at bare addresses: no page is ever unmapped


class Phase(IntEnum):
    """How far a server is. ``READY`` means: a real token has come out of the whole engine."""

    STARTING = 0  # the API server imports
    LAUNCHING = 1  # the engine core starts and loads
    PROBING = 2
    READY = 3
    STOPPING = 4
    FAILED = 5


class Rank:
    """One worker's line. The worker writes it, everybody may read it."""

    def __init__(self, words: memoryview, address: int) -> None:
        self._words = words
        self.address = address  # of the beat counter: a u64 that only this worker increments

    @property
    def beats(self) -> int:
        """Beginnings and ends of this worker's steps: odd while a step is in flight."""
        return int(self._words[0])

    def beat(self) -> None:
        """Counts the beginning or the end of a step; for workers without a native counter."""
        self._words[0] = self._words[0] + 1

    def moved(self) -> None:
        """Counts progress that is no step: an odd count goes on to mean a step in flight."""
        self._words[0] = self._words[0] + 2

    def loading(self, done: int, total: int) -> None:
        """Bytes of experts that have been read, of all that this worker reads."""
        self._words[2] = total
        self._words[1] = done

    @property
    def loaded(self) -> tuple[int, int]:
        """What ``loading`` was last told; ``(0, 0)`` before the first call."""
        return int(self._words[1]), int(self._words[2])

    def claim(self) -> None:
        """Says which process beats here."""
        self._words[3] = os.getpid()

    @property
    def pid(self) -> int:
        """The process that claimed this line; 0 when none has."""
        return int(self._words[3])


class Page:
    """A mapped heartbeat page. It stays mapped until the process ends: the pool counts in it."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self._mapped = mapped
        _kept.append(mapped)
        self._words = memoryview(mapped).cast("Q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    @classmethod
    def create(cls, path: Path) -> Page:
        """Makes the file, readable by this user only, and maps it.

        Raises:
            EngineError: there is no room for it.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, PAGE_BYTES)  # a full disk is told here, not later
                page = cls(path, mmap.mmap(descriptor, PAGE_BYTES))
            finally:
                os.close(descriptor)
        except OSError as error:
            what = f"the heartbeat page {path} cannot be made: {error}"
            raise EngineError(what, hint="is the disk full?") from error
        page._words[0] = MAGIC
        page._words[3] = os.getpid()
        return page

    @classmethod
    def open(cls, path: str | Path) -> Page:
        """Maps the page that a supervisor has made.

        Raises:
            EngineError: there is no such file, or it is not a heartbeat page.
        """
        path = Path(path)
        try:
            with path.open("r+b") as file:
                mapped = mmap.mmap(file.fileno(), PAGE_BYTES)
        except (OSError, ValueError) as error:
            hint = "it belongs to a server that has ended; start it again with `moet serve`"
            raise EngineError(f"no heartbeat page at {path}: {error}", hint=hint) from error
        page = cls(path, mapped)
        if page._words[0] != MAGIC:
            hint = "it was written by another version of moet: stop that server first"
            raise EngineError(f"{path} is not a heartbeat page", hint=hint)
        return page

    def rank(self, index: int) -> Rank:
        """The line of worker ``index``, counted over the whole server."""
        if not 0 <= index < MAX_RANKS:
            hint = "use fewer workers a server"
            raise EngineError(f"rank {index} is outside 0..{MAX_RANKS - 1}", hint=hint)
        first = (1 + index) * LINE_WORDS
        return Rank(self._words[first : first + LINE_WORDS], self._address + first * 8)

    def ranks(self) -> list[Rank]:
        """The lines that a worker has claimed."""
        return [rank for rank in map(self.rank, range(MAX_RANKS)) if rank.pid]

    @property
    def beats(self) -> int:
        """The sum of all workers' counters: it moves when any worker makes progress."""
        return sum(self.rank(index).beats for index in range(MAX_RANKS))

    @property
    def is_stepping(self) -> bool:
        """Whether a step of any worker is in flight."""
        return any(self.rank(index).beats & 1 for index in range(MAX_RANKS))

    @property
    def phase(self) -> Phase:
        """How far the server is."""
        return Phase(self._words[1])

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._words[1] = int(phase)

    @property
    def supervisor(self) -> int:
        """The process that made the page."""
        return int(self._words[3])

    @property
    def loop_beats(self) -> int:
        """Turns of the API server's event loop: it stands still when that process hangs."""
        return int(self._words[2])

    def beat_loop(self) -> None:
        """Counts one turn of the event loop."""
        self._words[2] = self._words[2] + 1

    def fail(self, error: MoetError) -> None:
        """Leaves a failure for the supervisor to show. The first one stays: it is the cause."""
        if self.failure is None:
            data = b"\0".join([str(error).encode()[:3000], error.hint.encode()[:1000]])
            self._mapped[TEXT_AT + 4 : TEXT_AT + 4 + len(data)] = data
            self._mapped[TEXT_AT : TEXT_AT + 4] = len(data).to_bytes(4, "little")
        self.phase = Phase.FAILED

    @property
    def failure(self) -> EngineError | None:
        """The failure that some process of this server left, or None."""
        size = int.from_bytes(self._mapped[TEXT_AT : TEXT_AT + 4], "little")
        if size == 0:
            return None
        text = self._mapped[TEXT_AT + 4 : TEXT_AT + 4 + size].decode(errors="ignore")
        message, _, hint = text.partition("\0")
        return EngineError(message, hint=hint)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Leaves a ``MoetError`` of the block on the page and lets it pass."""
        try:
            yield
        except MoetError as error:
            self.fail(error)
            raise
