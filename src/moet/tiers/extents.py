"""Who has which part of an arena: first fit over free extents, neighbours merged. Pure integers.

Experts of a model have one size, or one a layer kind, so first fit leaves no holes that matter.
"""

from __future__ import annotations

from bisect import bisect_left


class Extents:
    """Free extents of [0, capacity), in units of ``alignment`` bytes.

    Args:
        capacity: bytes, a multiple of ``alignment``.
        alignment: sizes are rounded up to it and offsets are multiples of it.
    """

    def __init__(self, capacity: int, alignment: int) -> None:
        self.capacity = capacity
        self.alignment = alignment
        self.free_bytes = capacity
        self._starts: list[int] = [0] if capacity else []
        self._sizes: list[int] = [capacity] if capacity else []

    def rounded(self, nbytes: int) -> int:
        """``nbytes`` rounded up to the alignment."""
        return -(-nbytes // self.alignment) * self.alignment

    @property
    def largest(self) -> int:
        """Bytes of the largest free extent."""
        return max(self._sizes, default=0)

    def take(self, nbytes: int) -> int | None:
        """Offset of ``rounded(nbytes)`` bytes, or None where no extent is large enough."""
        size = self.rounded(nbytes)
        for i, free in enumerate(self._sizes):
            if free >= size:
                return self._take_from(i, size)
        return None

    def _take_from(self, i: int, size: int) -> int:
        offset = self._starts[i]
        self.free_bytes -= size
        if self._sizes[i] == size:
            del self._starts[i], self._sizes[i]
        else:
            self._starts[i] += size
            self._sizes[i] -= size
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Returns what ``take(nbytes)`` gave, and merges it with its free neighbours."""
        size = self.rounded(nbytes)
        self.free_bytes += size
        i = bisect_left(self._starts, offset)
        self._starts.insert(i, offset)
        self._sizes.insert(i, size)
        self._merge(i)
        if i:
            self._merge(i - 1)

    def _merge(self, i: int) -> None:
        if i + 1 < len(self._starts) and self._starts[i] + self._sizes[i] == self._starts[i + 1]:
            self._sizes[i] += self._sizes[i + 1]
            del self._starts[i + 1], self._sizes[i + 1]
