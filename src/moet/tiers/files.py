"""A file that records are read from: opened past the page cache where the filesystem lets us."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import stat
from dataclasses import dataclass, field
from pathlib import Path

from moet.base.errors import TierError
from moet.base.report import Finding, Level
from moet.tiers.api import RECORD_ALIGNMENT


@dataclass(slots=True)
class OpenFile:
    """A file that is open to be read.

    Attributes:
        path: where it was found.
        fd: its descriptor.
        direct: reads go past the page cache and must be aligned.
        size: in bytes, when it was opened.
        mtime_ns: time of its last change, then.
        index: its number in a reader; -1: in none.
    """

    path: Path
    fd: int
    direct: bool
    size: int
    mtime_ns: int
    _place: tuple[int, int] = field(repr=False)
    index: int = -1

    @classmethod
    def open(cls, path: Path) -> OpenFile:
        """Opens a regular file.

        Raises:
            TierError: there is none, it cannot be read, or the limit of open files is reached.
        """
        try:
            fd, direct = _open(path)
        except OSError as error:
            raise _cannot_open(path, error) from error
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            os.close(fd)
            raise TierError(f"{path} is not a file", hint="name a file with records")
        place = (state.st_dev, state.st_ino)
        return cls(path, fd, direct, state.st_size, state.st_mtime_ns, place)

    def changed(self) -> str:
        """How the open file differs from when it was opened; empty: not at all."""
        try:
            state = os.fstat(self.fd)
        except OSError as error:
            return f"it cannot be looked at any more: {error.strerror}"
        if state.st_size != self.size:
            return f"its size was {self.size} bytes and is {state.st_size}"
        if state.st_mtime_ns != self.mtime_ns:
            return "it was written to since it was opened"
        return ""

    def replaced(self) -> str:
        """What has become of the name since; empty: it still leads to the open file. Reads of the
        open file go on giving its own bytes."""
        try:
            state = os.stat(self.path)
        except OSError as error:
            return f"its name leads nowhere any more: {error.strerror}"
        if (state.st_dev, state.st_ino) != self._place:
            return "another file was put in its place"
        return ""

    def finding(self) -> Finding:
        """Of a file that is read through the page cache."""
        return Finding(
            level=Level.INFO,
            topic="disk reads",
            fact=f"{self.path} goes through the page cache: its filesystem has no O_DIRECT",
            consequence="one more copy of every byte",
            fix="keep it on a local ext4, xfs or btrfs",
        )

    def close(self) -> None:
        """Closes it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _open(path: Path) -> tuple[int, bool]:
    """(descriptor, whether past the page cache). The first block is read to find out."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    else:
        if _reads_directly(fd):
            return fd, True
        os.close(fd)
    fd = os.open(path, flags)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd, False


def _reads_directly(fd: int) -> bool:
    block = mmap.mmap(-1, RECORD_ALIGNMENT)
    try:
        os.preadv(fd, [block], 0)
    except OSError as error:
        # Anything else is the disk's own trouble: the reads will tell it.
        return error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}
    finally:
        block.close()
    return True


def _cannot_open(path: Path, error: OSError) -> TierError:
    hints = {
        errno.ENOENT: "look at the path; was the file moved or removed?",
        errno.EACCES: "give this user the right to read it",
        errno.EMFILE: f"raise ulimit -n: it is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}",
        errno.ENFILE: "raise fs.file-max: the whole machine has no file left",
    }
    hint = hints.get(error.errno or 0, "look at the path and at the kernel's log")
    return TierError(f"{path} cannot be opened: {error.strerror}", hint=hint)
