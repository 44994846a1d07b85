"""Where the experts of one layer are, as the card sees it: the authority for who computes what.

A step's kernels read the table in device memory; the CPU computes what the card's post asks for,
and so needs no copy. Entries change on the host and reach the card in the order of a stream,
between two steps. One that changes while an earlier `publish` is on its way may arrive with that
one already; so an expert is put when its record has landed, and a record may be overwritten when
the stream has passed the `publish` that follows its removal.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import TierError
from moet.kernels.cuda.layer import ELSEWHERE, FOREIGN

_ENTRY = 8


class TableCard(Protocol):
    """What a table needs of a GPU."""

    def allocate(self, nbytes: int) -> int: ...  # noqa: D102
    def free(self, address: int) -> None: ...  # noqa: D102


class TableLink(Protocol):
    """What a table needs of a GPU's host link."""

    def pinned(self, nbytes: int) -> int: ...  # noqa: D102
    def free_pinned(self, address: int) -> None: ...  # noqa: D102
    def upload_async(self, address: int, source: int, nbytes: int, stream: int) -> None: ...  # noqa: D102


class ExpertTable:
    """The table of one layer on one card; at first every expert is elsewhere.

    Args:
        card: for device memory.
        link: for pinned memory and copies.
        experts: E.
    """

    def __init__(self, card: TableCard, link: TableLink, experts: int) -> None:
        self._card, self._link = card, link
        self.experts = experts
        self.nbytes = _ENTRY * experts
        self.address = card.allocate(self.nbytes)
        """Of the table in device memory, u64 [E]; valid from the first `publish` on."""
        self._pinned = link.pinned(self.nbytes)
        words = (ctypes.c_uint64 * experts).from_address(self._pinned)
        self._entries: NDArray[np.uint64] = np.ctypeslib.as_array(words)
        self._entries[:] = ELSEWHERE

    def put(self, expert: int, address: int) -> None:
        """The expert's record lies at a device address from the next `publish` on.

        Raises:
            TierError: no such expert, or an address that no record can have.
        """
        self._check(expert)
        if address % 256 or address <= FOREIGN:
            raise TierError(
                f"a record at {address:#x} of the card",
                hint="records lie at multiples of 256 bytes of device memory",
            )
        self._entries[expert] = address

    def remove(self, expert: int) -> None:
        """The expert is elsewhere from the next `publish` on."""
        self._check(expert)
        self._entries[expert] = ELSEWHERE

    def mark_foreign(self, experts: Iterable[int]) -> None:
        """Another rank computes these experts: their slots are skipped."""
        for expert in experts:
            self._check(expert)
            self._entries[expert] = FOREIGN

    def publish(self, stream: int) -> None:
        """Enqueues the changes: steps enqueued on the stream from now on see them. Not while the
        stream is captured."""
        self._link.upload_async(self.address, self._pinned, self.nbytes, stream)

    @property
    def resident(self) -> tuple[int, ...]:
        """Experts on the card."""
        return tuple(int(e) for e in np.flatnonzero(self._entries > FOREIGN))

    @property
    def elsewhere(self) -> tuple[int, ...]:
        """Experts whose rows the CPU computes."""
        return tuple(int(e) for e in np.flatnonzero(self._entries == ELSEWHERE))

    def close(self) -> None:
        """Gives the memory back. No step may be in flight."""
        if self.address:
            self._card.free(self.address)
            self._entries = np.empty(0, np.uint64)
            self._link.free_pinned(self._pinned)
            self.address = 0

    def _check(self, expert: int) -> None:
        if not 0 <= expert < self.experts:
            raise TierError(
                f"expert {expert} of a layer of {self.experts}",
                hint="experts are numbered from 0",
            )
