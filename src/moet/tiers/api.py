"""What a tier promises: bytes under a key, lent out as leases that nothing can pull away.

A record is written once, inside a ``Reservation``, and is invisible until the reservation ends
without an exception. Readers hold a ``Lease``: as long as it is held the record stays where it is.
Every record has a generation that no later record of the tier repeats, so that whoever kept an
address past its lease can be told. All methods may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moet.checkpoint.keys import ExpertKey

__all__ = ["RECORD_ALIGNMENT", "ExpertKey", "Lease", "Reservation", "Stats", "Tier"]

RECORD_ALIGNMENT = 4096
"""Records start at multiples of this, in bytes; their sizes are rounded up to it."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What a tier holds and has done since it was made.

    Attributes:
        capacity: bytes that records may take.
        used: bytes that they take, rounded up to the alignment, reservations included.
        records: readable records.
        leases: leases that are held now.
        hits: ``acquire`` calls that found their record.
        misses: ``acquire`` calls that did not.
        bytes_written: payload of all finished reservations.
        bytes_leased: payload of all leases given.
        evictions: records dropped.
    """

    capacity: int
    used: int
    records: int
    leases: int
    hits: int
    misses: int
    bytes_written: int
    bytes_leased: int
    evictions: int


class Lease(Protocol):
    """A record that stays put until ``release``. Leaving the ``with`` block releases it.

    Attributes:
        key: whose record.
        nbytes: its size.
        generation: the record's number, never used twice in a tier.
    """

    @property
    def key(self) -> ExpertKey:
        """Whose record."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes, as it was reserved."""

    @property
    def generation(self) -> int:
        """The record's number."""

    @property
    def address(self) -> int:
        """Address of the first byte, a multiple of ``RECORD_ALIGNMENT``.

        Raises:
            TierError: the lease was released: what lies there now may be another record.
        """

    def view(self) -> NDArray[np.uint8]:
        """The record, u8 [nbytes], read-only. Do not keep it past the lease.

        Raises:
            TierError: the lease was released.
        """

    def release(self) -> None:
        """Gives the record back; the second time does nothing."""

    def __enter__(self) -> Lease: ...
    def __exit__(self, *error: object) -> None: ...


class Reservation(Protocol):
    """Room for a record, being written. Leaving the ``with`` block publishes it, or drops it where
    an exception leaves."""

    @property
    def key(self) -> ExpertKey:
        """Whose record."""

    @property
    def buffer(self) -> NDArray[np.uint8]:
        """The bytes to write, u8 [nbytes]; what they hold at first is undefined."""

    @property
    def address(self) -> int:
        """Address of the first byte."""

    def __enter__(self) -> Reservation: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class Tier(Protocol):
    """A place for records."""

    def reserve(self, key: ExpertKey, nbytes: int) -> Reservation:
        """Room for a new record.

        Raises:
            TierError: no room (with the numbers), the key is taken or being written, the tier is
                closed, or nbytes < 1.
        """

    def put(self, key: ExpertKey, data: NDArray[np.uint8]) -> None:
        """Stores a copy of ``data``, u8 [n]. Raises as ``reserve``."""

    def acquire(self, key: ExpertKey) -> Lease:
        """Lends a record.

        Raises:
            TierError: no such record, or the tier is closed.
        """

    def evict(self, key: ExpertKey) -> None:
        """Drops a record.

        Raises:
            TierError: no such record, it is leased, or the tier is closed.
        """

    def __contains__(self, key: object) -> bool:
        """Whether ``acquire(key)`` would find a record."""

    def keys(self) -> Iterator[ExpertKey]:
        """Keys of the readable records, as they were at the call."""

    def stats(self) -> Stats:
        """Counters, consistent with each other."""

    def close(self) -> None:
        """Gives the memory back; the second time does nothing.

        Raises:
            TierError: a lease is held or a reservation is open.
        """
