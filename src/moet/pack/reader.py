"""Opens a pack, or says why not; tells where each record lies and whether its bytes are right."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moet.checkpoint.keys import ExpertKey
from moet.checkpoint.open import Checkpoint
from moet.formats.tiling import ExpertLayout
from moet.pack.faults import BrokenPack, PackFault, unreadable
from moet.pack.identity import difference, identify, with_contents
from moet.pack.journal import JOURNAL
from moet.pack.locks import FolderLock
from moet.pack.spec import MANIFEST, Manifest, PackModel, Plan, checksum_of, read_manifest

U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Where a record lies.

    Attributes:
        file: its number in ``Pack.files``.
        offset: of its first byte, a multiple of 4096.
        nbytes: its size, a multiple of 4096.
        checksum: xxh3-64 of its bytes.
    """

    file: int
    offset: int
    nbytes: int
    checksum: int


class Pack:
    """A complete pack whose manifest and file sizes were checked. Any thread may ask it.

    Attributes:
        folder: where its manifest is.
        manifest: what it says.
        files: its data files, as absolute paths.
    """

    def __init__(self, folder: Path, manifest: Manifest, checksum: int) -> None:
        self.folder = folder
        self.manifest = manifest
        self.files = data_files(manifest.plan, folder)
        self._checksum = checksum

    @property
    def plan(self) -> Plan:
        """Geometry, identity and places."""
        return self.manifest.plan

    @property
    def layout(self) -> ExpertLayout:
        """Of one record: a whole expert."""
        return self.plan.layout

    @property
    def nbytes(self) -> int:
        """Of all records."""
        return self.plan.nbytes

    def keys(self) -> Iterator[ExpertKey]:
        """Of all records."""
        return iter(self.plan.keys)

    def __len__(self) -> int:
        return self.plan.records

    def __contains__(self, key: object) -> bool:
        return isinstance(key, tuple) and self.plan.index(ExpertKey(*key)) is not None

    def place(self, key: ExpertKey) -> RecordPlace:
        """Where a record lies.

        Raises:
            BrokenPack: NO_RECORD.
        """
        index = self.plan.index(key)
        if index is None:
            what = f"it has no expert {key[1]} of layer {key[0]}"
            raise BrokenPack(PackFault.NO_RECORD, self.folder, what)
        file, offset = self.plan.place(index)
        checksum = self.manifest.checksums[index]
        return RecordPlace(file, offset, self.layout.record_bytes, checksum)

    def matches(self, key: ExpertKey, data: U8) -> bool:
        """Whether ``data`` is the record: u8, all of it."""
        return checksum_of(data) == self.place(key).checksum

    def verify(self, key: ExpertKey, data: U8) -> None:
        """Refuses bytes that are not the record.

        Raises:
            BrokenPack: BAD_RECORD, with file and offset; NO_RECORD.
        """
        if not self.matches(key, data):
            raise self.bad_record(key, "do not match the checksum")

    def bad_record(self, key: ExpertKey, why: str) -> BrokenPack:
        """The error for a record; ``why`` completes "its bytes ..."."""
        place = self.place(key)
        span = f"bytes {place.offset} to {place.offset + place.nbytes - 1}"
        what = f"expert {key[1]} of layer {key[0]} ({span}): its bytes {why}"
        return BrokenPack(PackFault.BAD_RECORD, self.files[place.file], what)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Inside, nobody can remove the pack. For servers; any number may hold it.

        Raises:
            BrokenPack: it is being removed, was removed, or is another one by now.
        """
        with FolderLock(self.folder, shared=True):
            if self._manifest_now() != self._checksum:
                what = "it is not the pack any more that was opened"
                raise BrokenPack(PackFault.CHANGED, self.folder, what, hint="start again")
            yield

    def _manifest_now(self) -> int:
        if not (self.folder / MANIFEST).exists():
            raise BrokenPack(PackFault.NO_PACK, self.folder, "it was removed a moment ago")
        return read_manifest(self.folder / MANIFEST)[1]


def data_files(plan: Plan, folder: Path) -> tuple[Path, ...]:
    """The paths of a pack's data files."""
    home = Path(os.path.abspath(folder))
    return tuple((Path(file.folder) if file.folder else home) / file.name for file in plan.files)


def open_pack(
    folder: Path | str, checkpoint: Checkpoint | None = None, *, full: bool = False
) -> Pack:
    """Opens a complete pack. Reads the manifest, the files' sizes and the checkpoint's headers.

    Args:
        folder: the pack's own.
        checkpoint: the one that it must be of; None: of any.
        full: compare the hash of all bytes of the checkpoint, where the pack has it, in place of
            the times of the last change: a copied checkpoint is accepted, at the cost of a read.

    Raises:
        BrokenPack: anything that is wrong, by name.
        BrokenCheckpoint: a file of the checkpoint cannot be read.
    """
    folder = Path(folder)
    _require_pack(folder)
    manifest, checksum = read_manifest(folder / MANIFEST)
    pack = Pack(folder, manifest, checksum)
    for number, file in enumerate(pack.files):
        _check_size(file, manifest.plan.file_bytes(number))
    if checkpoint is not None:
        _check_identity(pack, checkpoint, full=full)
    return pack


def _require_pack(folder: Path) -> None:
    try:
        names = {entry.name for entry in folder.iterdir()}
    except FileNotFoundError as error:
        raise BrokenPack(PackFault.NO_PACK, folder, "there is no such folder") from error
    except OSError as error:
        raise unreadable(folder, error) from error
    if MANIFEST not in names and JOURNAL in names:
        raise BrokenPack(PackFault.UNFINISHED, folder, "its writing was stopped before the end")
    if MANIFEST not in names:
        raise BrokenPack(PackFault.NO_PACK, folder, f"there is no {MANIFEST} in it")


def _check_size(file: Path, wanted: int) -> None:
    try:
        there = file.stat().st_size
    except FileNotFoundError as error:
        raise BrokenPack(PackFault.MISSING_FILE, file, "the data file is missing") from error
    except OSError as error:
        raise unreadable(file, error) from error
    if there != wanted:
        what = f"it has {there} bytes and the manifest says {wanted}"
        raise BrokenPack(PackFault.WRONG_SIZE, file, what)


def require_model(pack: Pack, checkpoint: Checkpoint) -> None:
    """Raises BrokenPack, OTHER_MODEL, where the checkpoint's experts have another geometry."""
    wanted, found = pack.plan.model.as_dict(), PackModel.of(checkpoint.geometry).as_dict()
    if odd := [key for key in wanted if wanted[key] != found[key]]:
        said = f"{odd[0]} {wanted[odd[0]]!s:.60}, and {found[odd[0]]!s:.60} in {checkpoint.folder}"
        raise BrokenPack(PackFault.OTHER_MODEL, pack.folder, f"it is of another model: {said}")


def _check_identity(pack: Pack, checkpoint: Checkpoint, *, full: bool) -> None:
    require_model(pack, checkpoint)
    now = identify(checkpoint)
    if full and all(file.content is not None for file in pack.plan.checkpoint):
        now = with_contents(checkpoint, now)
    if why := difference(pack.plan.checkpoint, now):
        what = f"it is not of {checkpoint.folder} as it is now: {why}"
        raise BrokenPack(PackFault.STALE, pack.folder, what)
