"""What a cascade holds and has done."""

from __future__ import annotations

from dataclasses import dataclass, field

from moet.tiers.placement import Placement
from moet.tiers.policy import Ids
from moet.tiers.readstats import Histogram


@dataclass(frozen=True, kw_only=True)
class CascadeStats:
    """Counters since the cascade was made, and what it holds now.

    Attributes:
        budget: bytes that records may take; what was asked for, in whole slots.
        arena: bytes that they take or could take now: more than the budget where it was shrunk and
            leases are in the way.
        slot: bytes of a slot.
        records: records below.
        resident: records in memory.
        window: those of them in the window.
        leases: leases and waiting calls.
        calls: calls of ``want``.
        hits: experts of calls that were in memory.
        joined: those whose read was under way already.
        misses: those whose read had to be started.
        hit_bytes: of the hits.
        reads: records read.
        read_bytes: bytes of them.
        failures: reads that failed.
        failed: records that cannot be read at present.
        evictions: records dropped.
        guesses: records read because they were expected.
        guessed_right: those of them that a call has used.
        stall_s: seconds that calls waited with nothing to compute.
        latency: seconds from asking for a record until it was there.
    """

    budget: int = 0
    arena: int = 0
    slot: int = 0
    records: int = 0
    resident: int = 0
    window: int = 0
    leases: int = 0
    calls: int = 0
    hits: int = 0
    joined: int = 0
    misses: int = 0
    hit_bytes: int = 0
    reads: int = 0
    read_bytes: int = 0
    failures: int = 0
    failed: int = 0
    evictions: int = 0
    guesses: int = 0
    guessed_right: int = 0
    stall_s: float = 0.0
    latency: Histogram = field(default_factory=Histogram)

    @property
    def hit_rate(self) -> float:
        """Share of the experts of calls that were in memory; 1 where there were none."""
        asked = self.hits + self.joined + self.misses
        return self.hits / asked if asked else 1.0


class Counters:
    """Adds up the counted part of ``CascadeStats``; its user guards it."""

    def __init__(self) -> None:
        self.calls = self.hits = self.joined = self.misses = self.hit_bytes = 0
        self.reads = self.read_bytes = self.failures = self.evictions = 0
        self.guesses = self.guessed_right = 0
        self.stall_s = 0.0
        self.buckets = [0] * len(Histogram().counts)

    def asked(self, place: Placement, ids: Ids, sizes: Ids) -> None:
        """A call begins, before its use is noted."""
        there, coming = place.there[ids], int(place.coming[ids].sum())
        hits = int(there.sum())
        self.calls += 1
        self.hits += hits
        self.joined += coming
        self.misses += len(ids) - hits - coming
        self.hit_bytes += int(sizes[ids[there]].sum())
        self.guessed_right += int(place.hinted[ids].sum())

    def landed(self, nbytes: int, seconds: float, *, guess: bool) -> None:
        """A record has come."""
        self.reads += 1
        self.read_bytes += nbytes
        self.guesses += guess
        self.buckets[Histogram.bucket(seconds)] += 1

    def counted(self) -> dict[str, int | float | Histogram]:
        """As fields of ``CascadeStats``."""
        values = {name: value for name, value in vars(self).items() if name != "buckets"}
        return {**values, "latency": Histogram(tuple(self.buckets))}
