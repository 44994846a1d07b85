"""The books of a tier whose records lie in one block of memory: who has which bytes, and may read.

``RamTier`` and ``CardTier`` share them; where the block is and how bytes get there is theirs.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import TierError
from moet.base.units import format_bytes
from moet.tiers.api import RECORD_ALIGNMENT, ExpertKey, Reservation, Stats
from moet.tiers.extents import Extents


class Room(Protocol):
    """Who has which part of the block: ``extents.Extents``, or one that cuts it otherwise."""

    @property
    def capacity(self) -> int:
        """Bytes in all."""

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody has."""

    @property
    def largest(self) -> int:
        """Bytes of the largest free part."""

    def take(self, nbytes: int) -> int | None:
        """Offset of so many bytes, or None."""

    def give(self, offset: int, nbytes: int) -> None:
        """Returns what ``take(nbytes)`` gave."""


class Record:
    """A readable record. ``leases`` is guarded by the tier's lock."""

    __slots__ = ("generation", "leases", "nbytes", "offset")

    def __init__(self, offset: int, nbytes: int, generation: int) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.generation = generation
        self.leases = 0


class ArenaLease:
    """See ``api.Lease``."""

    __slots__ = ("_live", "_record", "_tier", "key")

    def __init__(self, tier: ArenaTier, key: ExpertKey, record: Record) -> None:
        self._tier = tier
        self._record = record
        self._live = True
        self.key = key

    @property
    def nbytes(self) -> int:
        """Size of the record in bytes."""
        return self._record.nbytes

    @property
    def generation(self) -> int:
        """The record's number, never used twice in a tier."""
        return self._record.generation

    @property
    def address(self) -> int:
        """Address of the first byte. Raises TierError once released."""
        self._check()
        return self._tier.address_of(self._record.offset)

    def view(self) -> NDArray[np.uint8]:
        """The record, u8 [nbytes], read-only. Raises TierError once released."""
        self._check()
        view = self._tier.read(self._record.offset, self._record.nbytes)
        view.flags.writeable = False
        return view

    def _check(self) -> None:
        if not self._live:
            raise TierError(
                f"the lease of {self.key} (generation {self.generation}) was released",
                hint="acquire the record again: its place may hold another one now",
            )

    def release(self) -> None:
        """Gives the record back; the second time does nothing."""
        self._tier.end_lease(self, self._record)

    def __enter__(self) -> ArenaLease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class ArenaTier(ABC):
    """Records in one block (see ``api.Tier``): all of a tier but the memory.

    The lock guards the books alone and is never held while memory is allocated, written or waited
    for.

    Args:
        capacity_bytes: what records may take in all, each rounded up to 4096 bytes.
        room: who has which part of it; extents of 4096 bytes by default.

    Raises:
        TierError: capacity below 1.
    """

    def __init__(self, capacity_bytes: int, room: Room | None = None) -> None:
        if capacity_bytes < 1:
            raise TierError(f"a capacity of {capacity_bytes} bytes", hint="at least 1 byte")
        capacity = -(-capacity_bytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
        self._extents: Room = room or Extents(capacity, RECORD_ALIGNMENT)
        self._lock = threading.Lock()
        self._records: dict[ExpertKey, Record] = {}
        self._writing: set[ExpertKey] = set()
        self._closed = False
        self._generation = self._leases = self._hits = self._misses = 0
        self._written = self._leased = self._evictions = 0

    @property
    def capacity(self) -> int:
        """Bytes that records may take."""
        return self._extents.capacity

    # What the memory is asked for.

    @abstractmethod
    def address_of(self, offset: int) -> int:
        """Address of a byte of the block."""

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """A part of the block, u8 [nbytes]: the bytes themselves, or a copy."""

    @abstractmethod
    def free_memory(self) -> None:
        """Gives the memory back; called once, when nobody uses it any more."""

    @abstractmethod
    def reserve(self, key: ExpertKey, nbytes: int) -> Reservation:
        """Room for a new record; see ``api.Tier.reserve``."""

    # What leases and reservations tell.

    def end_lease(self, lease: ArenaLease, record: Record) -> bool:
        """Called by ``ArenaLease.release``; False where that was released before."""
        with self._lock:
            if not lease._live:
                return False
            lease._live = False
            record.leases -= 1
            self._leases -= 1
            return True

    def begin_record(self, key: ExpertKey, nbytes: int) -> int:
        """Takes room for a record that is about to be written; its offset. Raises as ``reserve``.

        Whoever calls it owes one of ``publish_record``, ``drop_record`` and ``lose_record``.
        """
        if nbytes < 1:
            raise TierError(f"a record of {nbytes} bytes", hint="a record has at least 1 byte")
        with self._lock:
            self._check_open()
            if key in self._records or key in self._writing:
                raise TierError(f"{key} is there already", hint="evict it first")
            offset = self._extents.take(nbytes)
            if offset is None:
                raise TierError(self._no_room(nbytes), hint="evict records, or ask for more memory")
            self._writing.add(key)
            return offset

    def _no_room(self, nbytes: int) -> str:
        extents = self._extents
        free, largest = format_bytes(extents.free_bytes), format_bytes(extents.largest)
        return (
            f"no room for {format_bytes(nbytes)}: {free} of {format_bytes(extents.capacity)} are "
            f"free, {largest} in one piece"
        )

    def publish_record(self, key: ExpertKey, offset: int, nbytes: int) -> None:
        """The record is written: from now on it can be read."""
        with self._lock:
            self._writing.discard(key)
            self._generation += 1
            self._records[key] = Record(offset, nbytes, self._generation)
            self._written += nbytes

    def drop_record(self, key: ExpertKey, offset: int, nbytes: int) -> None:
        """The record was not written: its room is free again."""
        with self._lock:
            self._writing.discard(key)
            self._extents.give(offset, nbytes)

    def lose_record(self, key: ExpertKey) -> None:
        """The record may still be being written by something that cannot be stopped: its room is
        never used again."""
        with self._lock:
            self._writing.discard(key)

    # The rest of the protocol.

    def put(self, key: ExpertKey, data: NDArray[np.uint8]) -> None:
        """Stores a copy of ``data``, u8 [n]."""
        with self.reserve(key, data.size) as reservation:
            reservation.buffer[:] = data

    def acquire(self, key: ExpertKey) -> ArenaLease:
        """Lends a record; see ``api.Tier.acquire``."""
        with self._lock:
            self._check_open()
            record = self._records.get(key)
            if record is None:
                self._misses += 1
                raise TierError(f"no record of {key}", hint="it was not loaded, or was evicted")
            record.leases += 1
            self._leases += 1
            self._hits += 1
            self._leased += record.nbytes
            return ArenaLease(self, key, record)

    def evict(self, key: ExpertKey) -> None:
        """Drops a record; see ``api.Tier.evict``."""
        with self._lock:
            self._check_open()
            record = self._records.get(key)
            if record is None:
                raise TierError(f"no record of {key}", hint="it was not loaded, or was evicted")
            if record.leases:
                what = f"{key} is leased {record.leases} times and cannot be dropped"
                raise TierError(what, hint="release its leases first")
            del self._records[key]
            self._extents.give(record.offset, record.nbytes)
            self._evictions += 1

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._records

    def keys(self) -> Iterator[ExpertKey]:
        """Keys of the readable records, as they were at the call."""
        with self._lock:
            return iter(list(self._records))

    def stats(self) -> Stats:
        """Counters, consistent with each other."""
        with self._lock:
            return Stats(
                capacity=self._extents.capacity,
                used=self._extents.capacity - self._extents.free_bytes,
                records=len(self._records),
                leases=self._leases,
                hits=self._hits,
                misses=self._misses,
                bytes_written=self._written,
                bytes_leased=self._leased,
                evictions=self._evictions,
            )

    def close(self) -> None:
        """Gives the memory back; see ``api.Tier.close``."""
        with self._lock:
            if self._closed:
                return
            if self._leases or self._writing:
                what = f"{self._leases} leases and {len(self._writing)} reservations are open"
                raise TierError(f"the tier cannot be closed: {what}", hint="release them first")
            self._closed = True
            self._records.clear()
        self.free_memory()

    def _check_open(self) -> None:
        if self._closed:
            raise TierError("the tier is closed", hint="make a new one")
