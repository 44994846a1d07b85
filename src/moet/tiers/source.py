"""What the NVMe tier needs of whatever knows where records lie on disk: a pack, a checkpoint.

A source only tells places; it reads nothing. Two kinds of place exist. A record that lies on the
disk as it lies in memory is one span and has no ``finish``: it is read straight to where it is
wanted. A record that is put together on arrival has any number of spans, at any offset, and a
``finish`` that makes the record of their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moet.tiers.api import ExpertKey

Bytes = NDArray[np.uint8]
Finish = Callable[[Sequence[Bytes], Bytes], None]
"""``finish(parts, record)``: the bytes of the spans in their order, read-only, and the record to
fill, u8 [nbytes]. Called from any thread, several at a time. Raises a MoetError where the bytes are
not what they should be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file that records lie in, and what it was when the source described it.

    Attributes:
        path: where it is.
        size: its size in bytes; None: any.
        mtime_ns: its time of modification; None: any.
    """

    path: Path
    size: int | None = None
    mtime_ns: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Bytes of a file.

    Attributes:
        file: index in the source's ``files``.
        offset: of the first byte.
        nbytes: how many; at least 1.
    """

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a record lies and how it is known to be whole.

    Attributes:
        nbytes: size of the record.
        spans: what to read. Without ``finish`` exactly one, of ``nbytes`` at a multiple of
            ``RECORD_ALIGNMENT``.
        checksum: xxh3-64 of the record (of the finished one); None: there is none to compare with.
        finish: makes the record from the spans; None: the span is the record.
    """

    nbytes: int
    spans: tuple[Span, ...]
    checksum: int | None = None
    finish: Finish | None = None


class RecordSource(Protocol):
    """Where records lie. Nothing of it changes while a tier uses it; any thread may ask."""

    @property
    def files(self) -> Sequence[SourceFile]:
        """All files, in the order that ``Span.file`` counts."""

    def keys(self) -> Iterator[ExpertKey]:
        """Keys of all records."""

    def __contains__(self, key: object) -> bool:
        """Whether there is such a record."""

    def place(self, key: ExpertKey) -> Place:
        """Where a record lies. Cheap: it is asked for every read.

        Raises:
            KeyError: no such record.
        """
