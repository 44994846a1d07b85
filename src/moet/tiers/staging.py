"""Pinned buffers that bytes pass through on their way to a card."""

from __future__ import annotations

import ctypes
import queue

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import MoetError, TierError
from moet.base.units import format_bytes
from moet.tiers.api import RECORD_ALIGNMENT
from moet.tiers.memory import CardMemory


class Staging:
    """One buffer of a ring.

    Attributes:
        address: of its first byte.
        bytes: the buffer, u8.
    """

    __slots__ = ("address", "bytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        self.bytes: NDArray[np.uint8] = np.ctypeslib.as_array(memory)


class StagingRing:
    """Buffers of one size in one pinned block, lent one by one.

    Args:
        memory: where they are pinned.
        count: how many; with fewer than two, filling one could not overlap the copy of another.
        nbytes: of each; rounded up to 4096.

    Raises:
        TierError: fewer than 2 or empty, or the memory cannot be pinned.
    """

    def __init__(self, memory: CardMemory, count: int, nbytes: int) -> None:
        if count < 2 or nbytes < 1:
            what = f"{count} staging buffers of {nbytes} bytes"
            raise TierError(what, hint="two buffers of a byte are the least")
        self._memory = memory
        self.count = count
        self.nbytes = -(-nbytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
        try:
            self._block = memory.pin(count * self.nbytes)
        except MoetError as error:
            raise TierError(
                f"{format_bytes(count * self.nbytes)} of host memory cannot be pinned: {error}",
                hint="ask for fewer staging buffers, or raise the container's memory limit",
            ) from error
        # The buffer that was given back last is lent first: it is the warmest in the caches.
        self._free: queue.LifoQueue[Staging] = queue.LifoQueue()
        for i in range(count):
            self.give(Staging(self._block + i * self.nbytes, self.nbytes))

    def take(self, wait_s: float) -> Staging | None:
        """A buffer, as soon as one is free; None where none was for so many seconds."""
        try:
            return self._free.get(block=wait_s > 0, timeout=wait_s or None)
        except queue.Empty:
            return None

    def give(self, staging: Staging) -> None:
        """Back into the ring. A buffer that is never given back is never lent again."""
        self._free.put(staging)

    def close(self) -> None:
        """Unpins the block."""
        self._memory.unpin(self._block)
