"""A RAM tier that grows and shrinks while it is used: records in slots of one size.

Memory comes in segments, each a mapping in huge pages that is really there. To shrink, free slots
are made hollow: their pages go back to the kernel, wherever they lie, and no record moves. To grow,
hollow slots are filled again first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import TierError
from moet.base.units import format_bytes
from moet.tiers.api import RECORD_ALIGNMENT, ExpertKey
from moet.tiers.arena import Arena
from moet.tiers.ram import RamReservation
from moet.tiers.records import ArenaLease, ArenaTier, Record


class Slots:
    """Which slots are free; see ``records.Room``. Offsets are numbers times the size of a slot."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.count = 0
        self.free: list[int] = []

    @property
    def capacity(self) -> int:
        """Bytes of all slots."""
        return self.count * self.slot_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the free ones."""
        return len(self.free) * self.slot_bytes

    @property
    def largest(self) -> int:
        """Bytes of the largest record that there is room for."""
        return self.slot_bytes if self.free else 0

    def take(self, nbytes: int) -> int | None:
        """A slot; the one that was given back last is the warmest."""
        if nbytes > self.slot_bytes or not self.free:
            return None
        return self.free.pop() * self.slot_bytes

    def give(self, offset: int, nbytes: int) -> None:
        """Takes a slot back."""
        del nbytes
        self.free.append(offset // self.slot_bytes)

    def add(self, slots: list[int]) -> None:
        """New slots."""
        self.count += len(slots)
        self.free.extend(reversed(slots))

    def remove(self, most: int) -> list[int]:
        """Takes free slots away for good, the highest ones."""
        gone = sorted(self.free, reverse=True)[:most]
        self.free = [slot for slot in self.free if slot not in set(gone)]
        self.count -= len(gone)
        return gone


@dataclass
class Segment:
    """Slots of one mapping: ``first`` and the ``slots - 1`` that follow."""

    first: int
    slots: int
    arena: Arena
    hollow: set[int] = field(default_factory=set)
    pinned: bool = False


def _nothing(*_: object) -> None:
    pass


class SlotTier(ArenaTier):
    """Records in slots (see ``api.Tier``).

    Args:
        slot_bytes: of the largest record; rounded up to 4096.
        slots: how many, at first.
        released: called with the key when a lease has ended, from the thread that ended it.
        pin: called with address and size of memory that will stay, to register it with readers.
        unpin: called with its address before any of it is given back.

    Raises:
        TierError: no slot, or they do not fit in the available memory.
    """

    def __init__(
        self,
        slot_bytes: int,
        slots: int,
        *,
        released: Callable[[ExpertKey], None] = _nothing,
        pin: Callable[[int, int], object] = _nothing,
        unpin: Callable[[int], object] = _nothing,
    ) -> None:
        if slots < 1:
            raise TierError(f"{slots} slots", hint="one is the least")
        self.slot_bytes = -(-slot_bytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
        self._slots = Slots(self.slot_bytes)
        super().__init__(slots * self.slot_bytes, self._slots)
        self._released, self._pin, self._unpin = released, pin, unpin
        self._segments: list[Segment] = []
        self._resizing = threading.Lock()
        self._next = 0
        self.grow(slots)

    @property
    def slots(self) -> int:
        """Slots that there are."""
        return self._slots.count

    # The memory.

    def _segment(self, slot: int) -> Segment:
        for segment in self._segments:
            if segment.first <= slot < segment.first + segment.slots:
                return segment
        raise AssertionError(f"slot {slot} is in no segment")

    def _at(self, offset: int) -> tuple[Segment, int]:
        segment = self._segment(offset // self.slot_bytes)
        return segment, offset - segment.first * self.slot_bytes

    def address_of(self, offset: int) -> int:
        """Address of a byte of a slot."""
        segment, at = self._at(offset)
        return segment.arena.address + at

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """A part of a slot itself, u8 [nbytes]."""
        segment, at = self._at(offset)
        return segment.arena.bytes[at : at + nbytes]

    def free_memory(self) -> None:
        """Gives all of it back."""
        for segment in self._segments:
            self._set_pinned(segment, wanted=False)
            segment.arena.close()
        self._segments = []

    def _set_pinned(self, segment: Segment, *, wanted: bool) -> None:
        if segment.pinned != wanted:
            segment.pinned = wanted
            if wanted:
                self._pin(segment.arena.address, segment.arena.bytes.size)
            else:
                self._unpin(segment.arena.address)

    # Its size.

    def grow(self, slots: int) -> None:
        """Adds slots. Nobody waits for the memory but the caller.

        Raises:
            TierError: there is not so much memory. Then nothing was added.
        """
        with self._resizing:
            filled = self._fill(slots)
            try:
                if slots > len(filled):
                    filled += self._new_segment(slots - len(filled))
            except BaseException:
                self._hollow(filled)
                raise
            with self._lock:
                self._slots.add(sorted(filled))

    def _fill(self, most: int) -> list[int]:
        """Hollow slots, filled again."""
        filled: list[int] = []
        try:
            for segment in self._segments:
                for slot in sorted(segment.hollow)[: most - len(filled)]:
                    at = (slot - segment.first) * self.slot_bytes
                    segment.arena.populate(at, self.slot_bytes)
                    segment.hollow.discard(slot)
                    filled.append(slot)
                if not segment.hollow:
                    self._set_pinned(segment, wanted=True)
        except BaseException:
            self._hollow(filled)
            raise
        return filled

    def _new_segment(self, slots: int) -> list[int]:
        segment = Segment(self._next, slots, Arena(slots * self.slot_bytes, populate=True))
        self._set_pinned(segment, wanted=True)
        self._segments = [*self._segments, segment]  # readers may be going through the old list
        self._next += slots
        return list(range(segment.first, segment.first + slots))

    def shrink(self, slots: int) -> int:
        """Gives up to so many free slots back to the kernel; returns how many."""
        with self._resizing:
            with self._lock:
                gone = self._slots.remove(slots)
            self._hollow(gone)
            return len(gone)

    def _hollow(self, slots: list[int]) -> None:
        for slot in slots:
            segment = self._segment(slot)
            self._set_pinned(segment, wanted=False)
            segment.arena.hollow((slot - segment.first) * self.slot_bytes, self.slot_bytes)
            segment.hollow.add(slot)
        for segment in [s for s in self._segments if len(s.hollow) == s.slots]:
            segment.arena.close()
            self._segments = [s for s in self._segments if s is not segment]

    # The rest of the protocol.

    def reserve(self, key: ExpertKey, nbytes: int) -> RamReservation:
        """Room for a new record; see ``api.Tier.reserve``."""
        if nbytes > self.slot_bytes:
            raise TierError(
                f"{key} has {format_bytes(nbytes)}, a slot {format_bytes(self.slot_bytes)}",
                hint="make the tier with the size of the largest record",
            )
        return RamReservation(self, key, self.begin_record(key, nbytes), nbytes)

    def end_lease(self, lease: ArenaLease, record: Record) -> bool:
        """See ``ArenaTier.end_lease``; tells who wanted to know."""
        ended = super().end_lease(lease, record)
        if ended:
            self._released(lease.key)
        return ended
