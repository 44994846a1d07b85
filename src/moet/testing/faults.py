"""Tiers that misbehave on purpose: slow ones and failing ones, around any real one.

Both keep the protocol (they pass ``moet.testing.tiers``): what is slow or fails is the operation,
never the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import TierError
from moet.tiers.api import ExpertKey, Lease, Reservation, Stats, Tier


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
