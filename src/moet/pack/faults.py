"""Every way in which a pack can be wrong, by name, with what a user can do about it."""

from __future__ import annotations

import errno
from enum import StrEnum
from pathlib import Path

from moet.base.errors import PackError


class PackFault(StrEnum):
    """One way to be wrong. The value is stable: scripts may match on it."""

    # the folder and its manifest
    UNREADABLE = "unreadable"
    NO_PACK = "no-pack"
    UNFINISHED = "unfinished"
    TOO_LARGE = "too-large"
    DAMAGED_MANIFEST = "damaged-manifest"
    NOT_JSON = "not-json"
    UNKNOWN_FORMAT = "unknown-format"
    UNKNOWN_TILES = "unknown-tiles"
    BAD_FIELD = "bad-field"
    BAD_GEOMETRY = "bad-geometry"
    # the data files
    MISSING_FILE = "missing-file"
    WRONG_SIZE = "wrong-size"
    NO_RECORD = "no-record"
    BAD_RECORD = "bad-record"
    # pack and checkpoint
    OTHER_MODEL = "other-model"
    STALE = "stale"
    # writing and removing
    NO_SPACE = "no-space"
    WRITE_FAILED = "write-failed"
    FOREIGN = "foreign"
    BAD_JOURNAL = "bad-journal"
    CHANGED = "changed"
    IN_USE = "in-use"


_AGAIN = "remove it and pack again: moet pack rm FOLDER; moet pack MODEL"

HINTS: dict[PackFault, str] = {
    PackFault.UNREADABLE: "check that the path exists, that you may read it, and the disk's health",
    PackFault.NO_PACK: "moet pack MODEL writes one; moet pack list shows those that are there",
    PackFault.UNFINISHED: "moet pack MODEL goes on where it stopped",
    PackFault.UNKNOWN_FORMAT: "it was written by another version of moet: pack again",
    PackFault.UNKNOWN_TILES: "it was written by another version of moet: pack again",
    PackFault.MISSING_FILE: "mount the disk that it lies on; if it is lost, pack again",
    PackFault.NO_RECORD: "the pack is of a model with fewer layers or experts",
    PackFault.BAD_RECORD: "the disk has changed its bytes: look at its health, then pack again",
    PackFault.OTHER_MODEL: "give the pack of this model, or pack it: moet pack MODEL",
    PackFault.STALE: "the checkpoint has changed since: moet pack rm FOLDER; moet pack MODEL",
    PackFault.NO_SPACE: "free some space, or give another folder or several: --out DIR --out DIR",
    PackFault.WRITE_FAILED: "look at the disk, or give another folder: --out DIR",
    PackFault.FOREIGN: "give another folder: --out DIR; or remove what is there",
    PackFault.CHANGED: "wait until the download is over, then pack again",
    PackFault.IN_USE: "wait until it is over; moet pack list shows what is in use",
}


class BrokenPack(PackError):  # noqa: N818 - reads better in a raise than ...Error
    """A pack that cannot be used, written or removed.

    Args:
        fault: which way to be wrong.
        where: the file or the folder.
        what: the fact, with names and numbers.
        hint: instead of the fault's own hint.
    """

    def __init__(self, fault: PackFault, where: Path | str, what: str, *, hint: str = "") -> None:
        super().__init__(f"{where}: {what} [{fault}]", hint=hint or HINTS.get(fault, _AGAIN))
        self.fault = fault
        self.where = Path(where)


def unreadable(where: Path, error: OSError, doing: str = "cannot be read") -> BrokenPack:
    """The error for a read that the system refuses."""
    return BrokenPack(PackFault.UNREADABLE, where, f"{doing}: {error.strerror or error}")


def unwritable(where: Path, error: OSError, doing: str = "cannot be written") -> BrokenPack:
    """The error for a write that the system refuses: NO_SPACE or WRITE_FAILED."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    fault = PackFault.NO_SPACE if full else PackFault.WRITE_FAILED
    return BrokenPack(fault, where, f"{doing}: {error.strerror or error}")
