"""What can go wrong between a disk and a record, each told with the expert that it concerns."""

from __future__ import annotations

from pathlib import Path

from moet.base.errors import TierError
from moet.tiers.api import ExpertKey


class ReadError(TierError):
    """A record could not be read.

    Args:
        key: whose record.
        file: where it lies.
        offset: of the bytes that were asked for.
        cause: what happened, in words.
        hint: what the user can do.
    """

    def __init__(self, key: ExpertKey, file: Path, offset: int, cause: str, *, hint: str) -> None:
        super().__init__(
            f"expert {key.expert} of layer {key.layer}, {file} at byte {offset}: {cause}", hint=hint
        )
        self.key = key
        self.file = file
        self.offset = offset
        self.cause = cause


class ChecksumError(ReadError):
    """The bytes that came are not those that were written."""


class FileChangedError(ReadError):
    """The file is not the one that was opened."""


def describe(errno_text: str, number: int) -> tuple[str, str]:
    """(cause, hint) of an errno of a read."""
    return f"{errno_text} (errno {number})", _HINTS.get(number, _ANY)


_ANY = "look at the kernel's log (dmesg) for the disk's own words"
_HINTS = {
    5: "the disk or its filesystem failed: look at dmesg and smartctl, and restore the file",
    6: "the device is gone: look at its cable, its slot and dmesg, and restart when it is back",
    19: "the device is gone: look at its cable, its slot and dmesg, and restart when it is back",
    12: "the kernel has no memory left: look at the container's limit",
    116: "the file was removed on the server that has it: put it back and restart",
}
