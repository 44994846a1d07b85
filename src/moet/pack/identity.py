"""Which checkpoint a pack was made of: its files' names, sizes, times and headers.

A header holds every tensor's name, type, shape and place. Together with the size and the time of
the last change it tells a changed checkpoint from an unchanged one at the cost of a few reads. The
hash of all bytes costs a read of everything, so it is taken only when asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from moet.base import jsontext
from moet.checkpoint.faults import BrokenCheckpoint, Fault
from moet.checkpoint.header import check_length
from moet.checkpoint.open import Checkpoint

SUFFIX = ".moetpack"
_CHUNK_BYTES = 4 << 20
_LONGEST_NAME = 80


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A weight file of a checkpoint as it was when it was packed.

    Attributes:
        name: in the checkpoint's folder.
        nbytes: size.
        mtime_ns: time of the last change, nanoseconds since 1970.
        header: xxh3-64 of the header, its eight bytes of length included.
        content: xxh3-64 of the whole file; None: not taken.
    """

    name: str
    nbytes: int
    mtime_ns: int
    header: int
    content: int | None = None


def identify(checkpoint: Checkpoint) -> tuple[CheckpointFile, ...]:
    """The weight files of a checkpoint as they are now, by name.

    Raises:
        BrokenCheckpoint: a file cannot be read, or is no longer what it was when it was opened.
    """
    return tuple(_identify(file) for file in sorted(checkpoint.shards.files))


def _identify(file: Path) -> CheckpointFile:
    try:
        with file.open("rb") as stream:
            state = os.fstat(stream.fileno())
            length = check_length(stream.read(8), state.st_size, file)
            stream.seek(0)
            header = xxhash.xxh3_64_intdigest(stream.read(8 + length))
    except OSError as error:
        raise _unreadable(file, error) from error
    return CheckpointFile(as_text(file.name), state.st_size, state.st_mtime_ns, header)


def as_text(path: Path | str) -> str:
    """A path for JSON: bytes of it that are no UTF-8 become question marks."""
    return str(path).encode("utf-8", "replace").decode()


def _unreadable(file: Path, error: OSError) -> BrokenCheckpoint:
    what = f"cannot be read: {error.strerror or error}"
    return BrokenCheckpoint(Fault.UNREADABLE, file, what)


def with_contents(
    checkpoint: Checkpoint,
    files: Sequence[CheckpointFile],
    progress: Callable[[int, int], None] | None = None,
) -> tuple[CheckpointFile, ...]:
    """``files`` with the hashes of all their bytes.

    Args:
        checkpoint: an open one.
        files: from ``identify``.
        progress: called with bytes read and bytes in all.

    Raises:
        BrokenCheckpoint: a file cannot be read.
    """
    total, done = sum(file.nbytes for file in files), 0
    hashed = []
    for path, file in zip(sorted(checkpoint.shards.files), files, strict=True):
        digest = xxhash.xxh3_64()
        for chunk in _chunks(path):
            digest.update(chunk)
            done += len(chunk)
            if progress:
                progress(done, total)
        hashed.append(replace(file, content=digest.intdigest()))
    return tuple(hashed)


def _chunks(file: Path) -> Iterable[memoryview]:
    """The bytes of a file, in one buffer again and again; the kernel is told to forget them."""
    buffer = np.empty(_CHUNK_BYTES, np.uint8).data
    try:
        with file.open("rb", buffering=0) as stream:
            offset = 0
            while got := stream.readinto(buffer):
                yield buffer[:got]
                os.posix_fadvise(stream.fileno(), offset, got, os.POSIX_FADV_DONTNEED)
                offset += got
    except OSError as error:
        raise _unreadable(file, error) from error


def difference(packed: Sequence[CheckpointFile], found: Sequence[CheckpointFile]) -> str:
    """What tells two identities apart, in words; empty when nothing does.

    The content, where both know it, stands for the time of the last change: a copy has other times
    and the same bytes.
    """
    names = [file.name for file in packed], [file.name for file in found]
    if names[0] != names[1]:
        odd = sorted(set(names[0]) ^ set(names[1])) or ["the order"]
        return f"its weight files are others: {odd[0]}"
    return next(filter(None, map(_difference, packed, found)), "")


def _difference(old: CheckpointFile, new: CheckpointFile) -> str:
    if old.nbytes != new.nbytes:
        return f"{old.name} had {old.nbytes} bytes and has {new.nbytes}"
    if old.header != new.header:
        return f"the header of {old.name} is another"
    if old.content is not None and new.content is not None:
        return "" if old.content == new.content else f"the bytes of {old.name} are others"
    return "" if old.mtime_ns == new.mtime_ns else f"{old.name} was written again"


def pack_name(checkpoint: Checkpoint, files: Sequence[CheckpointFile]) -> str:
    """``<model>-<identity>.moetpack``: another state of the checkpoint has another name."""
    rows = [[f.name, f.nbytes, f.mtime_ns, f"{f.header:016x}"] for f in files]
    identity = xxhash.xxh3_64_hexdigest(jsontext.dumps(rows, indent=None).encode())
    return f"{model_name(checkpoint.folder)}-{identity[:8]}{SUFFIX}"


def model_name(folder: Path) -> str:
    """A checkpoint folder's name in letters that every filesystem and shell takes."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", folder.resolve().name)[:_LONGEST_NAME]
    return name.lstrip(".-") or "model"
