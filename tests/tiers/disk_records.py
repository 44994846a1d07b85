"""Records in files, and sources that tell where they lie: for tests of what reads disks."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from moet.testing.tiers import PAGE, pattern
from moet.tiers.api import ExpertKey
from moet.tiers.source import Place, SourceFile, Span

U8 = NDArray[np.uint8]


def memory(nbytes: int) -> U8:
    """Page-aligned, u8 [nbytes rounded up to a page]."""
    return np.frombuffer(mmap.mmap(-1, -(-nbytes // PAGE) * PAGE), np.uint8)


@dataclass
class Disk:
    """A source of records that are kept in memory too."""

    files: Sequence[SourceFile]
    places: dict[ExpertKey, Place] = field(default_factory=dict)
    records: dict[ExpertKey, U8] = field(default_factory=dict)

    def keys(self) -> Iterator[ExpertKey]:
        return iter(self.places)

    def __contains__(self, key: object) -> bool:
        return key in self.places

    def place(self, key: ExpertKey) -> Place:
        return self.places[key]


def write_disk(folder: Path, count: int, nbytes: int, files: int = 1) -> Disk:
    """``count`` records of ``nbytes``, striped over files as a pack does it."""
    keys = [ExpertKey(i // 4, i % 4) for i in range(count)]
    paths = [folder / f"experts-{i}.bin" for i in range(files)]
    slot = -(-nbytes // PAGE) * PAGE
    disk = Disk([SourceFile(path=path) for path in paths])
    for i, key in enumerate(keys):
        disk.records[key] = record = pattern(key, nbytes)
        with paths[i % files].open("ab") as stream:
            stream.write(record.tobytes() + bytes(slot - nbytes))
        span = Span(file=i % files, offset=i // files * slot, nbytes=nbytes)
        checksum = xxhash.xxh3_64_intdigest(record.data)
        disk.places[key] = Place(nbytes=nbytes, spans=(span,), checksum=checksum)
    return disk
