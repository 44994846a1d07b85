"""The RAM tier: records in one huge-page arena of fixed size."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import TierError
from moet.base.units import format_bytes
from moet.tiers.api import RECORD_ALIGNMENT, ExpertKey, Stats
from moet.tiers.arena import Arena
from moet.tiers.extents import Extents


class _Record:
    """A readable record. ``leases`` is guarded by the tier's lock."""

    __slots__ = ("generation", "leases", "nbytes", "offset")

    def __init__(self, offset: int, nbytes: int, generation: int) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.generation = generation
        self.leases = 0


class RamLease:
    """See ``api.Lease``."""

    __slots__ = ("_live", "_record", "_tier", "key")

    def __init__(self, tier: RamTier, key: ExpertKey, record: _Record) -> None:
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
        view = self._tier.bytes_of(self._record.offset, self._record.nbytes)
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

    def __enter__(self) -> RamLease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class RamReservation:
    """See ``api.Reservation``."""

    __slots__ = ("_open", "_tier", "address", "buffer", "key", "offset")

    def __init__(self, tier: RamTier, key: ExpertKey, offset: int, nbytes: int) -> None:
        self._tier = tier
        self._open = True
        self.key = key
        self.offset = offset
        self.buffer = tier.bytes_of(offset, nbytes)
        self.address = tier.address_of(offset)

    def __enter__(self) -> RamReservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._open:
            self._open = False
            nbytes = self.buffer.size
            self.buffer = np.empty(0, np.uint8)
            self._tier.end_reservation(self.key, self.offset, nbytes, publish=kind is None)


class RamTier:
    """Records in memory (see ``api.Tier``).

    Args:
        capacity_bytes: what records may take in all, each rounded up to 4096 bytes.
        populate: fault all of it in now (the default: a server must not find out later). Tests
            and tools that fill only a part may say no.

    Raises:
        TierError: capacity below 1, or it does not fit in the available memory.
    """

    def __init__(self, capacity_bytes: int, *, populate: bool = True) -> None:
        if capacity_bytes < 1:
            raise TierError(f"a capacity of {capacity_bytes} bytes", hint="at least 1 byte")
        capacity = -(-capacity_bytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
        self._extents = Extents(capacity, RECORD_ALIGNMENT)
        self._arena = Arena(capacity, populate=populate)
        self._lock = threading.Lock()
        self._records: dict[ExpertKey, _Record] = {}
        self._writing: set[ExpertKey] = set()
        self._closed = False
        self._generation = self._leases = self._hits = self._misses = 0
        self._written = self._leased = self._evictions = 0

    @property
    def capacity(self) -> int:
        """Bytes that records may take."""
        return self._extents.capacity

    # What leases and reservations ask of their tier.

    def address_of(self, offset: int) -> int:
        """Address of a byte of the arena."""
        return self._arena.address + offset

    def bytes_of(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """A part of the arena, u8 [nbytes]."""
        return self._arena.bytes[offset : offset + nbytes]

    def end_lease(self, lease: RamLease, record: _Record) -> None:
        """Called by ``RamLease.release``."""
        with self._lock:
            if lease._live:
                lease._live = False
                record.leases -= 1
                self._leases -= 1

    def end_reservation(self, key: ExpertKey, offset: int, nbytes: int, *, publish: bool) -> None:
        """Called at the end of a reservation: the record becomes readable, or its room is free."""
        with self._lock:
            self._writing.discard(key)
            if not publish:
                self._extents.give(offset, nbytes)
                return
            self._generation += 1
            self._records[key] = _Record(offset, nbytes, self._generation)
            self._written += nbytes

    # The protocol.

    def reserve(self, key: ExpertKey, nbytes: int) -> RamReservation:
        """Room for a new record; see ``api.Tier.reserve``."""
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
        return RamReservation(self, key, offset, nbytes)

    def _no_room(self, nbytes: int) -> str:
        extents = self._extents
        free, largest = format_bytes(extents.free_bytes), format_bytes(extents.largest)
        return (
            f"no room for {format_bytes(nbytes)}: {free} of {format_bytes(extents.capacity)} are "
            f"free, {largest} in one piece"
        )

    def put(self, key: ExpertKey, data: NDArray[np.uint8]) -> None:
        """Stores a copy of ``data``, u8 [n]."""
        with self.reserve(key, data.size) as reservation:
            reservation.buffer[:] = data

    def acquire(self, key: ExpertKey) -> RamLease:
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
            return RamLease(self, key, record)

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
            self._arena.close()
            self._closed = True
            self._records.clear()

    def __enter__(self) -> RamTier:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise TierError("the tier is closed", hint="make a new one")
