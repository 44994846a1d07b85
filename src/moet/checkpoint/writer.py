"""Writes checkpoint folders: shards, index, config. Streams, and never looks complete early.

Shards grow under ``*.partial`` names. When all are on the disk they get their own names, then the
index, then config.json: a folder that lacks config.json is not a checkpoint to anybody.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import UsageError
from moet.base.units import format_bytes
from moet.checkpoint.faults import BrokenCheckpoint, Fault
from moet.checkpoint.geometry import CONFIG
from moet.checkpoint.header import DTYPE_BITS
from moet.checkpoint.shards import INDEX, SINGLE

U8 = NDArray[np.uint8]

PARTIAL = ".partial"
CHUNK_BYTES = 16 << 20
SHARD_BYTES = 5 * 10**9  # what hubs use; a shard is closed before it would pass this
_SPARE_BYTES = 64 << 20  # left free on the disk besides the files


class Source(Protocol):
    """The bytes of a tensor, wherever they come from."""

    def fill(self, out: U8, offset: int) -> None:
        """Writes bytes ``offset`` .. ``offset + out.size`` of the tensor into ``out``."""


@dataclass(frozen=True)
class ArraySource:
    """A tensor that is in memory."""

    array: NDArray[Any]

    def fill(self, out: U8, offset: int) -> None:
        """Copies."""
        flat = np.ascontiguousarray(self.array).reshape(-1).view(np.uint8)
        out[:] = flat[offset : offset + out.size]


@dataclass(frozen=True)
class TensorPlan:
    """A tensor to be written.

    Attributes:
        dtype: safetensors name, ``BF16``.
        source: its bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: Source

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def header_bytes(plans: Iterable[TensorPlan]) -> bytes:
    """The header of a file that holds these tensors in this order, its length included."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for plan in plans:
        begin, end = end, end + plan.nbytes
        offsets = [begin, end]
        entries[plan.name] = {
            "dtype": plan.dtype,
            "shape": list(plan.shape),
            "data_offsets": offsets,
        }
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # the format's own writer aligns the tensors too
    return len(raw).to_bytes(8, "little") + raw


def cut_into_shards(plans: Sequence[TensorPlan], shard_bytes: int) -> list[list[TensorPlan]]:
    """Tensors in order, a new shard where the next tensor would pass ``shard_bytes``."""
    shards: list[list[TensorPlan]] = [[]]
    size = 0
    for plan in plans:
        if shards[-1] and size + plan.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(plan)
        size += plan.nbytes
    return shards


def check_space(folder: Path, nbytes: int) -> None:
    """Refuses to start what the disk cannot hold.

    Raises:
        BrokenCheckpoint: NO_SPACE, with both numbers.
    """
    free = shutil.disk_usage(folder).free
    if nbytes + _SPARE_BYTES > free:
        what = f"{format_bytes(nbytes)} are to be written and {format_bytes(free)} are free"
        raise BrokenCheckpoint(Fault.NO_SPACE, folder, what)


def _write_tensor(fd: int, plan: TensorPlan, buffer: U8, count: Callable[[int], None]) -> None:
    for offset in range(0, plan.nbytes, buffer.size):
        chunk = buffer[: min(buffer.size, plan.nbytes - offset)]
        plan.source.fill(chunk, offset)
        _write_all(fd, chunk.data)
        count(chunk.size)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _write_shard(
    file: Path, plans: Sequence[TensorPlan], buffer: U8, count: Callable[[int], None]
) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        _write_all(fd, memoryview(header_bytes(plans)))
        for plan in plans:
            _write_tensor(fd, plan, buffer, count)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_json(file: Path, content: Any) -> None:
    partial = file.with_name(file.name + PARTIAL)
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(file)


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _missing(folder: Path) -> list[Path]:
    """The folder and those above it that are not there yet, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"the folder cannot be made: {error.strerror}"
        hint = "give a folder that you may write"
        raise BrokenCheckpoint(Fault.UNREADABLE, folder, what, hint=hint) from error
    if any(not entry.name.endswith(PARTIAL) for entry in folder.iterdir()):
        raise BrokenCheckpoint(Fault.NOT_EMPTY, folder, "there is something in the folder already")


def _take_back(folder: Path, names: Sequence[str], made: Sequence[Path]) -> None:
    """Removes what a run that has failed was writing, and the folders that it had made."""
    with suppress(OSError):  # the disk may have gone: the first error is the one to tell
        for name in (CONFIG, INDEX, *names):
            for file in (folder / name, folder / (name + PARTIAL)):
                file.unlink(missing_ok=True)
        for path in made:
            path.rmdir()


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    plans: Sequence[TensorPlan],
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes a checkpoint folder.

    Args:
        folder: new or empty.
        config: for config.json.
        plans: the tensors.
        shard_bytes: size of a shard, unless one tensor alone is larger.
        progress: called with bytes written and bytes in all.

    Raises:
        BrokenCheckpoint: NOT_EMPTY, NO_SPACE, or UNREADABLE when the disk fails or fills up. What
            was being written is gone then, as it is after a ctrl-C.
        UsageError: shards of no bytes.
    """
    if shard_bytes < 1:
        raise UsageError(f"shards of {shard_bytes} bytes", hint="for example 4GiB")
    total = sum(plan.nbytes for plan in plans)
    made = _missing(folder)
    check_space(next(path for path in (folder, *folder.absolute().parents) if path.exists()), total)
    _prepare(folder)
    shards = cut_into_shards(plans, shard_bytes)
    names = _shard_names(len(shards))
    partials = [folder / (name + PARTIAL) for name in names]
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress(done, total)

    try:
        buffer = np.empty(min(CHUNK_BYTES, max((p.nbytes for p in plans), default=1)), np.uint8)
        for partial, shard in zip(partials, shards, strict=True):
            _write_shard(partial, shard, buffer, count)
        for partial, name in zip(partials, names, strict=True):
            partial.replace(folder / name)
        if len(names) > 1:
            weight_map = {p.name: n for n, s in zip(names, shards, strict=True) for p in s}
            _write_json(
                folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}
            )
        _write_json(folder / CONFIG, config)
    except KeyboardInterrupt:
        _take_back(folder, names, made)
        raise
    except OSError as error:
        _take_back(folder, names, made)
        fault = Fault.NO_SPACE if error.errno == 28 else Fault.UNREADABLE
        what = f"writing stopped after {format_bytes(done)}: {error.strerror}"
        hint = "" if fault is Fault.NO_SPACE else "look at the disk, or give another folder"
        raise BrokenCheckpoint(fault, folder, what, hint=hint) from error
