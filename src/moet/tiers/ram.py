"""The RAM tier: records in one huge-page arena of fixed size."""

from __future__ import annotations

from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from moet.tiers.api import ExpertKey
from moet.tiers.arena import Arena
from moet.tiers.records import ArenaTier


class RamReservation:
    """See ``api.Reservation``. The buffer is the record's own place."""

    __slots__ = ("_open", "_tier", "address", "buffer", "key", "offset")

    def __init__(self, tier: ArenaTier, key: ExpertKey, offset: int, nbytes: int) -> None:
        self._tier = tier
        self._open = True
        self.key = key
        self.offset = offset
        self.buffer = tier.read(offset, nbytes)
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
            end = self._tier.publish_record if kind is None else self._tier.drop_record
            end(self.key, self.offset, nbytes)


class RamTier(ArenaTier):
    """Records in memory (see ``api.Tier``).

    Args:
        capacity_bytes: what records may take in all, each rounded up to 4096 bytes.
        populate: fault all of it in now (the default: a server must not find out later). Tests
            and tools that fill only a part may say no.

    Raises:
        TierError: capacity below 1, or it does not fit in the available memory.
    """

    def __init__(self, capacity_bytes: int, *, populate: bool = True) -> None:
        super().__init__(capacity_bytes)
        self._arena = Arena(self.capacity, populate=populate)

    def address_of(self, offset: int) -> int:
        """Address of a byte of the arena."""
        return self._arena.address + offset

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """A part of the arena itself, u8 [nbytes]."""
        return self._arena.bytes[offset : offset + nbytes]

    def free_memory(self) -> None:
        """Gives the arena back."""
        self._arena.close()

    def reserve(self, key: ExpertKey, nbytes: int) -> RamReservation:
        """Room for a new record; see ``api.Tier.reserve``."""
        return RamReservation(self, key, self.begin_record(key, nbytes), nbytes)

    def __enter__(self) -> RamTier:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
