"""Counters of a tier that reads disks, and how long its reads took."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields, replace

BUCKETS = 32
"""Bucket i holds what is below 2^i microseconds and in no lower one; the last holds the rest."""


@dataclass(frozen=True)
class Histogram:
    """Durations by powers of two: enough to tell 1 ms from 2, and to add up over processes.

    Attributes:
        counts: of each bucket.
    """

    counts: tuple[int, ...] = (0,) * BUCKETS

    @staticmethod
    def bucket(seconds: float) -> int:
        """The bucket of a duration."""
        return min(int(max(seconds, 0.0) * 1e6).bit_length(), BUCKETS - 1)

    @property
    def total(self) -> int:
        """Durations counted."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Seconds that at least such a share does not exceed, rounded up to a power of two of
        microseconds; 0 where nothing was counted."""
        wanted, seen = share * self.total, 0
        for i, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return float(1 << i) * 1e-6
        return 0.0


@dataclass(frozen=True, kw_only=True)
class ReadStats:
    """What a tier has read since it was made.

    Attributes:
        records: records in its source.
        reads: records delivered.
        nbytes: bytes of them.
        nbytes_read: bytes that the disks gave, alignment and second tries included.
        in_flight: records asked for that are neither delivered nor failed.
        verified: records whose checksum was compared.
        retries: second tries.
        mismatches: checksums that differed, second tries included.
        failures: records that were not delivered.
        queue_s: seconds that spans waited in the queue, summed.
        disk_s: seconds that they took from then, summed.
        verify_s: seconds of comparing checksums, summed.
        latency: seconds from asking for a record until it was delivered.
    """

    records: int = 0
    reads: int = 0
    nbytes: int = 0
    nbytes_read: int = 0
    in_flight: int = 0
    verified: int = 0
    retries: int = 0
    mismatches: int = 0
    failures: int = 0
    queue_s: float = 0.0
    disk_s: float = 0.0
    verify_s: float = 0.0
    latency: Histogram = field(default_factory=Histogram)


class Meter:
    """Adds up ``ReadStats`` for any number of threads."""

    def __init__(self, records: int) -> None:
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._sums: dict[str, float] = {f.name: 0 for f in fields(ReadStats) if f.name != "latency"}
        self._sums["records"] = records
        self._buckets = [0] * BUCKETS

    def add(self, **amounts: float) -> None:
        """Adds to the fields of those names."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] += amount
            if not self._sums["in_flight"]:
                self._idle.notify_all()

    def delivered(self, nbytes: int, seconds: float) -> None:
        """A record has arrived."""
        with self._lock:
            self._buckets[Histogram.bucket(seconds)] += 1
        self.add(reads=1, nbytes=nbytes, in_flight=-1)

    def wait_idle(self) -> None:
        """Returns when nothing is in flight."""
        with self._lock:
            self._idle.wait_for(lambda: not self._sums["in_flight"])

    def read(self) -> ReadStats:
        """All of it, consistent with each other."""
        with self._lock:
            latency = Histogram(tuple(self._buckets))
            return replace(ReadStats(**self._sums), latency=latency)  # type: ignore[arg-type]
