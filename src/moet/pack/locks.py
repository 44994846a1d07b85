"""Who uses a pack: a lock on the file ``lock`` of its folder, shared by readers.

The kernel gives a lock back when its process ends, however it ends: nothing is left to clean up.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from moet.pack.faults import BrokenPack, PackFault, unreadable, unwritable

LOCK = "lock"
_TRIES = 20  # somebody who only asks whether a pack is in use holds its lock for an instant
_PAUSE_S = 0.05


class FolderLock:
    """A lock that is held until ``release``; of no use to forked children.

    Args:
        folder: of the pack.
        shared: with other readers; else alone.

    Raises:
        BrokenPack: IN_USE, or the lock cannot be had.
    """

    def __init__(self, folder: Path, *, shared: bool) -> None:
        self._fd = _open(folder / LOCK, shared=shared)
        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            for attempt in range(_TRIES):
                if self._try(how):
                    break
                if attempt == _TRIES - 1:
                    raise BrokenPack(PackFault.IN_USE, folder, _used(folder, shared=shared))
                time.sleep(_PAUSE_S)
            if not self._is_still(folder / LOCK):
                raise BrokenPack(PackFault.NO_PACK, folder, "it was removed a moment ago")
        except BaseException:
            os.close(self._fd)
            raise

    def _try(self, how: int) -> bool:
        try:
            fcntl.flock(self._fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _is_still(self, path: Path) -> bool:
        """Whether the file is the one that has the name: it may be removed while we wait."""
        try:
            return os.path.samestat(os.fstat(self._fd), path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Gives it back; the second time does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _used(folder: Path, *, shared: bool) -> str:
    complete = (folder / "manifest.json").exists()
    if complete and not shared:
        return "it is being used by another process"
    return "it is being removed" if complete else "another process is writing it"


def _open(path: Path, *, shared: bool) -> int:
    """A reader needs no right to write the folder, as long as the file is there."""
    try:
        if shared and path.exists():
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise (unreadable if shared else unwritable)(path, error, "cannot be locked") from error


def is_used(folder: Path) -> bool:
    """Whether a process reads or writes the pack now.

    Raises:
        BrokenPack: UNREADABLE.
    """
    try:
        fd = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise unreadable(folder / LOCK, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
