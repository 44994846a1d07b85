"""Asynchronous reads of files, with futures: the compiled reader (csrc/io) behind a small protocol.

Which of io_uring and threads reads is decided once, by trying, when a ``Reader`` is made
(docs/decisions/nvme.md).
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from moet import _core
from moet.base.env import IO_MODES
from moet.base.errors import TierError
from moet.base.report import Finding, Level
from moet.base.units import format_bytes
from moet.machine.memory import read_memory
from moet.tiers.files import OpenFile

DEPTH: Final = 16
"""Pieces at a device at once."""
PIECE: Final = 1 << 20
"""Bytes of a piece."""


class Ask(NamedTuple):
    """A read that is wanted.

    Attributes:
        file: index that ``Reads.open`` gave.
        offset: of the first byte.
        nbytes: how many, at least 1. Of a file past the page cache, offset, size and address are
            multiples of 4096.
        address: where they go; the memory stays until the read's future is done.
        urgent: goes before those that are not, at the same device.
    """

    file: int
    offset: int
    nbytes: int
    address: int
    urgent: bool = True


class Landed(NamedTuple):
    """A read that has ended well.

    Attributes:
        nbytes: bytes read; fewer than were asked for only where the file ends.
        queued_s: seconds until its first piece went to the disk.
        disk_s: seconds from then.
    """

    nbytes: int
    queued_s: float
    disk_s: float


class Reads(Protocol):
    """What reads for a tier: ``Reader``, or a wrapper around one. Any thread may call it."""

    @property
    def backend(self) -> str:
        """``io_uring`` or ``threads``."""

    def open(self, path: Path) -> OpenFile:
        """Opens a file to read. Raises TierError."""

    def submit(self, asks: Sequence[Ask]) -> list[Future[Landed]]:
        """Starts reads: all, or none where it raises. The futures fail with OSError, cannot be
        cancelled, and call back on a thread that must not be held up.

        Raises:
            TierError: a read that cannot be, or the reader is closed.
        """

    def register(self, address: int, nbytes: int) -> Finding:
        """Pins memory that reads go to; tells whether that was possible."""

    def unregister(self, address: int) -> None:
        """Ends ``register``."""

    def findings(self) -> list[Finding]:
        """How it reads, and why so."""

    def stop(self) -> None:
        """Fails reads that have not begun with ECANCELED and waits for the others. None can be
        started any more."""

    def close(self) -> None:
        """Stops, and closes the files. The second time does nothing."""


class Reader:
    """See ``Reads``.

    Args:
        mode: ``auto``, ``uring`` or ``threads``, as MOET_IO.
        depth: pieces at a device at once.
        piece: bytes of a piece, a multiple of 4096.

    Raises:
        TierError: io_uring was forced and cannot be used, or no thread can be made.
    """

    def __init__(self, mode: str = "auto", *, depth: int = DEPTH, piece: int = PIECE) -> None:
        if mode not in IO_MODES:
            raise TierError(f"{mode!r} is no way to read", hint=" or ".join(IO_MODES))
        self.why = "threads were asked for" if mode == "threads" else _core.probe_uring()
        if mode == "uring" and self.why:
            what = f"io_uring cannot be used: {self.why}"
            raise TierError(what, hint="MOET_IO=auto or MOET_IO=threads reads without it")
        with _refusals():
            self._core = _core.Reader(uring=not self.why, depth=depth, piece=piece)
        self.backend = self._core.backend
        self._files: list[OpenFile] = []
        self._waiting: dict[int, Future[Landed]] = {}
        self._tags = itertools.count(1)
        self._thread = threading.Thread(
            target=_deliver, args=(self._core, self._waiting), name="moet-landed", daemon=True
        )
        self._thread.start()
        # Also when forgotten, and before the interpreter ends: the thread must not outlive it.
        self._stop = weakref.finalize(self, _stop, self._core, self._thread)
        self._close = weakref.finalize(self, _close, self._stop, self._files)

    @property
    def core(self) -> _core.Reader:
        """The compiled reader: for tests."""
        return self._core

    def open(self, path: Path) -> OpenFile:
        """See ``Reads.open``."""
        opened = OpenFile.open(path)
        try:
            with _refusals():
                opened.index = self._core.add_file(opened.fd, opened.direct)
        except BaseException:
            opened.close()
            raise
        self._files.append(opened)
        return opened

    def submit(self, asks: Sequence[Ask]) -> list[Future[Landed]]:
        """See ``Reads.submit``."""
        futures: dict[int, Future[Landed]] = {next(self._tags): Future() for _ in asks}
        for future in futures.values():
            future.set_running_or_notify_cancel()
        self._waiting.update(futures)
        try:
            with _refusals():
                self._core.submit(
                    [(a.file, a.offset, a.nbytes, a.address, tag, a.urgent)
                     for tag, a in zip(futures, asks, strict=True)]
                )  # fmt: skip
        except Exception:  # a ctrl-C may come when they have been started: they are told of then
            for tag in futures:
                del self._waiting[tag]
            raise
        return list(futures.values())

    def register(self, address: int, nbytes: int) -> Finding:
        """See ``Reads.register``."""
        with _refusals():
            error = self._core.register_memory(address, nbytes)
        size = format_bytes(nbytes)
        if not error:
            return Finding(level=Level.OK, topic="disk buffers", fact=f"{size} registered")
        if self.backend == "threads":
            return Finding(level=Level.INFO, topic="disk buffers", fact="threads register none")
        limit = read_memory().memlock
        allowed = "no limit" if limit is None else format_bytes(limit)
        return Finding(
            level=Level.INFO,
            topic="disk buffers",
            fact=f"{size} could not be registered: {os.strerror(error)} (ulimit -l: {allowed})",
            consequence="the kernel looks the memory up for every read",
            fix="raise ulimit -l (LimitMEMLOCK=, docker run --ulimit memlock=-1), Linux 5.19 or up",
        )

    def unregister(self, address: int) -> None:
        """See ``Reads.unregister``."""
        with _refusals():
            self._core.unregister_memory(address)

    def findings(self) -> list[Finding]:
        """See ``Reads.findings``."""
        found = [Finding(level=Level.INFO, topic="disk reads", fact=f"by {self.backend}")]
        if self.why:
            found = [
                Finding(level=Level.INFO, topic="disk reads", fact=f"by {self.backend}: {self.why}")
            ]
        return found + [file.finding() for file in self._files if not file.direct]

    def stop(self) -> None:
        """See ``Reads.stop``."""
        if threading.current_thread() is self._thread:
            what = "a reader cannot be stopped by the thread that tells of its reads"
            raise TierError(what, hint="stop it from another thread, not from a callback")
        self._stop()

    def close(self) -> None:
        """See ``Reads.close``."""
        self.stop()
        self._close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _deliver(core: _core.Reader, waiting: dict[int, Future[Landed]]) -> None:
    """Turns what has ended into results, until the reader is closed."""
    while ended := core.take(-1.0):
        for tag, result, queued_ns, disk_ns in ended:
            if (future := waiting.pop(tag, None)) is None:
                continue  # an error here would end the thread, and hang all who wait
            if result < 0:
                future.set_exception(OSError(-result, os.strerror(-result)))
            else:
                future.set_result(Landed(result, queued_ns * 1e-9, disk_ns * 1e-9))


def _stop(core: _core.Reader, thread: threading.Thread) -> None:
    try:
        core.close()
    except _core.Refusal:
        return  # a forked child that ends: it has none of the threads
    if thread is not threading.current_thread():
        thread.join()


def _close(stop: weakref.finalize[..., Reader], files: list[OpenFile]) -> None:
    stop()
    while files:
        files.pop().close()


@contextmanager
def _refusals() -> Iterator[None]:
    """Refusals of the core as errors of the tier."""
    try:
        yield
    except _core.Refusal as refusal:
        message, hint = refusal.args
        raise TierError(message, hint=hint or "this is a fault of the caller") from refusal
