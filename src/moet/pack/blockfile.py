"""Files of whole 4 KiB blocks, read and written past the page cache where the filesystem lets us.

Data that passes the cache would push out what the machine works with, and a check would be served
from memory instead of the disk. Where O_DIRECT is refused (tmpfs, some network filesystems) the
same calls go through the cache, and the kernel is told to forget.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from moet.pack.faults import BrokenPack, PackFault, unreadable, unwritable

U8 = NDArray[np.uint8]


def aligned_buffer(nbytes: int) -> U8:
    """Memory for such a file: page-aligned, zero, u8 [nbytes]."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


class BlockFile:
    """One file, for any number of threads.

    Offsets, sizes and the buffers' addresses are multiples of 4096.

    Args:
        path: the file.
        write: made where it is missing, and writable.

    Raises:
        BrokenPack: it cannot be opened.
    """

    def __init__(self, path: Path, *, write: bool = False) -> None:
        self.path = path
        mode = (os.O_RDWR | os.O_CREAT) if write else os.O_RDONLY
        try:
            self._fd, self.direct = _open(path, mode | os.O_CLOEXEC)
        except OSError as error:
            raise (unwritable if write else unreadable)(path, error, "cannot be opened") from error

    def read(self, out: U8, offset: int) -> None:
        """Fills ``out``.

        Raises:
            BrokenPack: UNREADABLE, or WRONG_SIZE where the file ends before.
        """
        done = 0
        while done < out.size:
            direct = self.direct
            try:
                got = os.preadv(self._fd, [out.data[done:]], offset + done)
            except OSError as error:
                if self._goes_indirect(error, direct):
                    continue
                raise unreadable(self.path, error, f"reading at {offset + done} failed") from error
            if got == 0:
                what = f"it ends at byte {offset + done}"
                raise BrokenPack(PackFault.WRONG_SIZE, self.path, what)
            done += got
        if not self.direct:
            os.posix_fadvise(self._fd, offset, out.size, os.POSIX_FADV_DONTNEED)

    def write(self, data: U8, offset: int) -> None:
        """Writes all of ``data``.

        Raises:
            BrokenPack: NO_SPACE or WRITE_FAILED.
        """
        done = 0
        while done < data.size:
            direct = self.direct
            try:
                done += os.pwrite(self._fd, data.data[done:], offset + done)
            except OSError as error:
                if not self._goes_indirect(error, direct):
                    what = f"writing at {offset + done} failed"
                    raise unwritable(self.path, error, what) from error

    def _goes_indirect(self, error: OSError, direct: bool) -> bool:
        """Whether a call is worth another try: it was made past the cache and refused there, which
        none will be any more. Several threads may be told so at once: each tries again."""
        if error.errno != errno.EINVAL or not direct:
            return False
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False
        return True

    def resize(self, nbytes: int) -> None:
        """Cuts or extends the file. What is new reads as zeros and takes no room yet.

        Raises:
            BrokenPack: NO_SPACE or WRITE_FAILED.
        """
        try:
            if os.fstat(self._fd).st_size != nbytes:
                os.ftruncate(self._fd, nbytes)
        except OSError as error:
            raise unwritable(self.path, error, f"cannot be {nbytes} bytes long") from error

    def sync(self) -> None:
        """Returns when all that was written is on the disk.

        Raises:
            BrokenPack: NO_SPACE or WRITE_FAILED.
        """
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise unwritable(self.path, error, "cannot be brought to the disk") from error
        if not self.direct:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Closes it."""
        os.close(self._fd)

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _open(path: Path, flags: int) -> tuple[int, bool]:
    """(descriptor, whether it is past the cache)."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o644), False


def sync_folder(folder: Path) -> None:
    """Returns when the names in a folder are on the disk.

    Raises:
        BrokenPack: WRITE_FAILED.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise unwritable(folder, error, "its names cannot be brought to the disk") from error


def replace_file(path: Path, data: bytes) -> None:
    """Writes a small file, whole or not at all: a second name, synced, renamed, folder synced.

    Raises:
        BrokenPack: NO_SPACE or WRITE_FAILED.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except OSError as error:
        raise unwritable(path, error) from error
    sync_folder(path.parent)
