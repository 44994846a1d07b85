"""A pack as a source of records for the NVMe tier: whole experts, read straight to their places."""

from __future__ import annotations

from collections.abc import Iterator

from moet.pack.reader import Pack
from moet.tiers.api import ExpertKey
from moet.tiers.source import Place, SourceFile, Span


class PackSource:
    """See ``RecordSource``. The caller is inside ``Pack.hold`` while a tier reads it.

    Args:
        pack: an open one.
    """

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        self.files = tuple(
            SourceFile(path=path, size=pack.plan.file_bytes(number))
            for number, path in enumerate(pack.files)
        )

    def keys(self) -> Iterator[ExpertKey]:
        """Keys of all records."""
        return self.pack.keys()

    def __contains__(self, key: object) -> bool:
        return key in self.pack

    def place(self, key: ExpertKey) -> Place:
        """Where a record lies. Raises KeyError where there is none."""
        if key not in self.pack:
            raise KeyError(key)
        at = self.pack.place(key)
        span = Span(file=at.file, offset=at.offset, nbytes=at.nbytes)
        return Place(nbytes=at.nbytes, spans=(span,), checksum=at.checksum)
