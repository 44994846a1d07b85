"""One record on its way from the disk: what to read, what came of it, and the second try."""

from __future__ import annotations

import ctypes
import errno
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import xxhash

from moet.base.errors import MoetError
from moet.tiers.api import RECORD_ALIGNMENT, ExpertKey
from moet.tiers.files import OpenFile
from moet.tiers.read_errors import ChecksumError, FileChangedError, ReadError, describe
from moet.tiers.reads import Ask, Landed
from moet.tiers.source import Bytes, Place

Publish = Callable[[BaseException | None], None]


class Arrival(NamedTuple):
    """A record that is where it was wanted, whole.

    Attributes:
        key: whose.
        nbytes: its size.
        verified: its checksum was compared, and is right.
        tries: 1, or 2 where the first one failed.
        seconds: from asking for it until now.
    """

    key: ExpertKey
    nbytes: int
    verified: bool
    tries: int
    seconds: float


def memory(address: int, nbytes: int) -> Bytes:
    """The memory at an address, u8 [nbytes]. Whoever passes the address vouches for it."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def down(offset: int) -> int:
    """The block that an offset lies in: its start."""
    return offset // RECORD_ALIGNMENT * RECORD_ALIGNMENT


def up(offset: int) -> int:
    """The end of the block before which an offset lies."""
    return -(-offset // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


class Fetch:
    """One record on its way. A single thread at a time works on it.

    Args:
        key: whose.
        place: where it lies.
        files: of the source, opened.
        into: address of the record's memory, with room up to the next multiple of 4096 bytes.
        verify: compare the checksum.
        urgent: before others that are not.
        publish: called last of all, before the future is done, with the error if there is one.
    """

    def __init__(
        self,
        key: ExpertKey,
        place: Place,
        files: Sequence[OpenFile],
        into: int,
        *,
        verify: bool,
        urgent: bool,
        publish: Publish | None,
    ) -> None:
        self.key = key
        self.place = place
        self.verify = verify and place.checksum is not None
        self.publish = publish
        self.future: Future[Arrival] = Future()
        self.future.set_running_or_notify_cancel()  # bytes may come at any time: no cancelling
        self.tries = 0
        self.buffer: Bytes | None = None
        self.landings: list[Future[Landed]] = []
        self.verify_s = 0.0
        self._files = files
        self._into = into
        self._urgent = urgent
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it was asked for."""
        return time.monotonic() - self._began

    @property
    def bounce_bytes(self) -> int:
        """Of the buffer that it needs; 0: it goes straight to its place."""
        if self.place.finish is None:
            return 0
        return sum(up(s.offset + s.nbytes) - down(s.offset) for s in self.place.spans)

    def asks(self) -> list[Ask]:
        """What to read: whole blocks."""
        to = self._into if self.buffer is None else int(self.buffer.ctypes.data)
        asks = []
        for span in self.place.spans:
            start, end = down(span.offset), up(span.offset + span.nbytes)
            index = self._files[span.file].index
            asks.append(Ask(index, start, end - start, to, self._urgent))
            to += end - start
        return asks

    def needs_a_worker(self) -> bool:
        """Whether something takes long: a checksum, a finish, a publisher."""
        return self.verify or self.place.finish is not None or self.publish is not None

    def settle(self) -> Arrival:
        """Called when all reads have ended: the record, checked and in its place.

        Raises:
            ReadError: it is not whole.
        """
        for i, landing in enumerate(self.landings):
            self._check_landing(i, landing)
        self._check_files()
        record = memory(self._into, self.place.nbytes)
        if self.place.finish is not None:
            self._finish(record)
        if self.verify:
            self._compare(record)
        return Arrival(self.key, self.place.nbytes, self.verify, self.tries, self.seconds)

    def _check_landing(self, i: int, landing: Future[Landed]) -> None:
        span = self.place.spans[i]
        error = landing.exception()
        if isinstance(error, OSError):
            cause, hint = describe(error.strerror or "", error.errno or 0)
            closing = error.errno == errno.ECANCELED
            raise self._error(
                i,
                "the tier was closed before it was read" if closing else cause,
                "close a tier when nobody needs it any more" if closing else hint,
            )
        if error is not None:
            raise error
        needed = span.offset + span.nbytes - down(span.offset)
        if landing.result().nbytes < needed:
            self._check_files()
            got = max(0, landing.result().nbytes - (span.offset - down(span.offset)))
            raise self._error(
                i,
                f"only {got} of {span.nbytes} bytes came",
                "the file is shorter than its description: make or download it again",
            )

    def _check_files(self) -> None:
        """A file that is written to while it is read gives bytes of no particular time."""
        for i, span in enumerate(self.place.spans):
            if why := self._files[span.file].changed():
                raise self._error(
                    i,
                    f"the file was changed under us: {why}",
                    "stop what writes to it, make it again, and restart",
                    FileChangedError,
                )

    def _finish(self, record: Bytes) -> None:
        assert self.buffer is not None, "a record that is put together has a buffer"
        assert self.place.finish is not None
        parts, at = [], 0
        for span in self.place.spans:
            start = at + span.offset - down(span.offset)
            part = self.buffer[start : start + span.nbytes]
            part.flags.writeable = False
            parts.append(part)
            at += up(span.offset + span.nbytes) - down(span.offset)
        try:
            self.place.finish(parts, record)
        except MoetError as error:
            raise self._error(0, str(error), error.hint or _DAMAGED) from error

    def _compare(self, record: Bytes) -> None:
        began = time.monotonic()
        found = xxhash.xxh3_64_intdigest(record.data)
        self.verify_s += time.monotonic() - began
        if found != self.place.checksum:
            raise self._error(
                0,
                f"its checksum is {found:016x} and should be {self.place.checksum:016x}",
                _DAMAGED,
                ChecksumError,
            )

    def _error(self, i: int, cause: str, hint: str, kind: type[ReadError] = ReadError) -> ReadError:
        span = self.place.spans[i]
        opened = self._files[span.file]
        if why := opened.replaced():
            cause = f"{cause} (and {why})"
        return kind(self.key, opened.path, span.offset, cause, hint=hint)


_DAMAGED = "the file is damaged: make or download it again, and look at the disk (dmesg, smartctl)"
