"""Tiers and disks that misbehave on purpose, around any real ones. None of it needs root.

The tiers keep the protocol (they pass ``moet.testing.tiers``): what is slow or fails is the
operation, never the bytes. The disks (``FaultyReads``) do everything that disks do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import TierError
from moet.base.report import Finding
from moet.tiers.api import ExpertKey, Lease, Reservation, Stats, Tier
from moet.tiers.files import OpenFile
from moet.tiers.reads import Ask, Landed, Reads


class WrappedTier:
    """Passes everything on. ``before`` is called first, with the operation's name and the key."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    def before(self, operation: str, key: ExpertKey) -> None:
        """What a subclass does before ``reserve``, ``acquire`` and ``evict``."""

    def reserve(self, key: ExpertKey, nbytes: int) -> Reservation:
        """See ``api.Tier``."""
        self.before("reserve", key)
        return self.inner.reserve(key, nbytes)

    def put(self, key: ExpertKey, data: NDArray[np.uint8]) -> None:
        """See ``api.Tier``."""
        with self.reserve(key, data.size) as reservation:
            reservation.buffer[:] = data

    def acquire(self, key: ExpertKey) -> Lease:
        """See ``api.Tier``."""
        self.before("acquire", key)
        return self.inner.acquire(key)

    def evict(self, key: ExpertKey) -> None:
        """See ``api.Tier``."""
        self.before("evict", key)
        self.inner.evict(key)

    def __contains__(self, key: object) -> bool:
        return key in self.inner

    def keys(self) -> Iterator[ExpertKey]:
        """See ``api.Tier``."""
        return self.inner.keys()

    def stats(self) -> Stats:
        """See ``api.Tier``."""
        return self.inner.stats()

    def close(self) -> None:
        """See ``api.Tier``."""
        self.inner.close()


class LatencyTier(WrappedTier):
    """Every operation takes longer.

    Args:
        inner: the tier that does the work.
        seconds: added to each operation, by its name; one that is not named is not slowed.
        sleep: what waits; tests may hand in a clock of their own.
    """

    def __init__(
        self,
        inner: Tier,
        seconds: dict[str, float],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._seconds = seconds
        self._sleep = sleep

    def before(self, operation: str, key: ExpertKey) -> None:
        """Waits."""
        del key
        if operation in self._seconds:
            self._sleep(self._seconds[operation])


class FaultyTier(WrappedTier):
    """Fails when told to.

    Args:
        inner: the tier that does the work.
        fails: asked before each operation, with its name and the key; True makes it fail.
    """

    def __init__(self, inner: Tier, fails: Callable[[str, ExpertKey], bool]) -> None:
        super().__init__(inner)
        self._fails = fails
        self.failures = 0

    def before(self, operation: str, key: ExpertKey) -> None:
        """Raises TierError where the plan says so."""
        if self._fails(operation, key):
            self.failures += 1
            raise TierError(f"{operation} of {key} failed on purpose", hint="this is a test")


def fail_nth(operation: str, n: int) -> Callable[[str, ExpertKey], bool]:
    """A plan for ``FaultyTier``: the n-th call (from 1) of one operation fails."""
    seen = 0

    def fails(name: str, key: ExpertKey) -> bool:
        nonlocal seen
        del key
        seen += name == operation
        return name == operation and seen == n

    return fails


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What happens to one read.

    Attributes:
        error: errno with which it fails; 0: it does not.
        short: bytes after which the file seems to end; what would follow is overwritten. None: it
            does not.
        flip: byte of which a bit is flipped; None: of none.
        delay_s: how much later it begins.
    """

    error: int = 0
    short: int | None = None
    flip: int | None = None
    delay_s: float = 0.0


EIO = Trouble(error=errno.EIO)
GONE = Trouble(error=errno.ENODEV)
Plan = Callable[[int, Ask], Trouble | None]
"""Asked for every read, with its number (from 1) and what is wanted; None: nothing happens."""


def nth_read(n: int, trouble: Trouble, times: int = 1) -> Plan:
    """The n-th read (from 1) has trouble, and so many in all from there on."""
    return lambda number, _: trouble if n <= number < n + times else None


def from_nth_read(n: int, trouble: Trouble) -> Plan:
    """The n-th read (from 1) and all that follow have trouble: a device that is gone, or slow."""
    return lambda number, _: trouble if number >= n else None


def reads_at(offset: int, trouble: Trouble) -> Plan:
    """Every read that holds that byte of its file has trouble: a bad block."""
    return lambda _, ask: trouble if ask.offset <= offset < ask.offset + ask.nbytes else None


class FaultyReads:
    """Reads (see ``moet.tiers.reads.Reads``) from a disk with trouble.

    Args:
        inner: what reads.
        plan: which reads have which trouble; may be replaced at any time.
    """

    def __init__(self, inner: Reads, plan: Plan) -> None:
        self.inner = inner
        self.plan = plan
        self.troubles = 0
        self._number = 0
        self._lock = threading.Lock()
        self._late: dict[threading.Timer, Future[Landed]] = {}

    @property
    def backend(self) -> str:
        """See ``Reads``."""
        return self.inner.backend

    def open(self, path: Path) -> OpenFile:
        """See ``Reads``."""
        return self.inner.open(path)

    def submit(self, asks: Sequence[Ask]) -> list[Future[Landed]]:
        """See ``Reads``."""
        troubles = []
        with self._lock:
            for ask in asks:
                self._number += 1
                troubles.append(self.plan(self._number, ask))
                self.troubles += troubles[-1] is not None
        sound = iter(self.inner.submit([a for a, t in zip(asks, troubles, strict=True) if not t]))
        return [
            self._spoilt(ask, trouble) if trouble else next(sound)
            for ask, trouble in zip(asks, troubles, strict=True)
        ]

    def _spoilt(self, ask: Ask, trouble: Trouble) -> Future[Landed]:
        future: Future[Landed] = Future()
        future.set_running_or_notify_cancel()
        if not trouble.delay_s:
            self._begin(ask, trouble, future)
            return future
        timer = threading.Timer(trouble.delay_s, lambda: self._late_one(timer, ask, trouble))
        timer.daemon = True
        with self._lock:
            self._late[timer] = future
        timer.start()
        return future

    def _late_one(self, timer: threading.Timer, ask: Ask, trouble: Trouble) -> None:
        with self._lock:
            future = self._late.pop(timer, None)
        if future is not None:
            self._begin(ask, trouble, future)

    def _begin(self, ask: Ask, trouble: Trouble, future: Future[Landed]) -> None:
        if trouble.error:
            future.set_exception(OSError(trouble.error, os.strerror(trouble.error)))
            return
        try:
            (landing,) = self.inner.submit([ask])
        except TierError:  # closed meanwhile
            future.set_exception(OSError(errno.ECANCELED, os.strerror(errno.ECANCELED)))
            return
        landing.add_done_callback(lambda landed: _spoil(ask, trouble, landed, future))

    def register(self, address: int, nbytes: int) -> Finding:
        """See ``Reads``."""
        return self.inner.register(address, nbytes)

    def unregister(self, address: int) -> None:
        """See ``Reads``."""
        self.inner.unregister(address)

    def findings(self) -> list[Finding]:
        """See ``Reads``."""
        return self.inner.findings()

    def stop(self) -> None:
        """See ``Reads``."""
        with self._lock:
            late, self._late = self._late, {}
        for timer, future in late.items():
            timer.cancel()
            future.set_exception(OSError(errno.ECANCELED, os.strerror(errno.ECANCELED)))
        self.inner.stop()

    def close(self) -> None:
        """See ``Reads``."""
        self.stop()
        self.inner.close()


def _spoil(ask: Ask, trouble: Trouble, landed: Future[Landed], future: Future[Landed]) -> None:
    """What came, with the trouble done to it."""
    if error := landed.exception():
        future.set_exception(error)
        return
    result = landed.result()
    data = (ctypes.c_uint8 * ask.nbytes).from_address(ask.address)
    if trouble.flip is not None:
        data[trouble.flip] ^= 0x10
    if trouble.short is not None:
        result = result._replace(nbytes=min(result.nbytes, trouble.short))
        ctypes.memset(ask.address + result.nbytes, 0xEE, ask.nbytes - result.nbytes)
    future.set_result(result)
