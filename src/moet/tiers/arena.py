"""One anonymous mapping in huge pages, its bytes really there before anybody relies on them."""

from __future__ import annotations

import errno
import mmap

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import TierError
from moet.base.units import format_bytes
from moet.machine.memory import read_memory

HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it before Python 3.14
_CHUNK = 256 << 20  # bytes faulted in at a time: between two, a signal can stop the process


def check_fits(nbytes: int) -> None:
    """Refuses an arena that the machine or the control group has no room for.

    Raises:
        TierError: with both numbers.
    """
    memory = read_memory()
    if nbytes <= memory.available:
        return
    limit = memory.limit
    of = "" if limit is None else f" (limit of the container: {format_bytes(limit)})"
    raise TierError(
        f"{format_bytes(nbytes)} for experts do not fit in the {format_bytes(memory.available)} "
        f"of memory that are available{of}",
        hint="stop other programs, raise the container's limit, or serve a smaller model",
    )


class Arena:
    """A private anonymous mapping, 2 MiB-aligned, advised to use huge pages.

    Args:
        nbytes: size; at least 1.
        populate: fault every page in now, so that no page is missing (or refused) later.

    Raises:
        TierError: it does not fit, or the kernel refuses.
    """

    def __init__(self, nbytes: int, *, populate: bool) -> None:
        check_fits(nbytes)
        try:
            # A huge page more than needed, so that an aligned start lies inside.
            mapping = mmap.mmap(-1, nbytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANON)
        except OSError as error:
            raise TierError(
                f"the kernel refuses a mapping of {format_bytes(nbytes)}: {error.strerror}",
                hint="look at vm.overcommit_memory and at `ulimit -v`",
            ) from error
        whole = np.frombuffer(mapping, dtype=np.uint8)
        self._mapping: mmap.mmap | None = mapping
        self._start = -whole.ctypes.data % HUGE_PAGE
        self.bytes: NDArray[np.uint8] = whole[self._start : self._start + nbytes]
        self.address = int(self.bytes.ctypes.data)
        _advise_huge(mapping)
        if populate:
            self.populate(0, nbytes)

    def populate(self, offset: int, nbytes: int) -> None:
        """Faults in a part, page-aligned, so that no page of it is missing later.

        Raises:
            TierError: the kernel cannot supply it.
        """
        assert self._mapping is not None, "closed"
        _populate(self._mapping, self._start + offset, self.bytes[offset : offset + nbytes])

    def hollow(self, offset: int, nbytes: int) -> None:
        """Gives the pages of a part back to the kernel; it is zeros when it is used again. What a
        reader or a card has pinned must be unpinned before: pins keep the old pages."""
        assert self._mapping is not None, "closed"
        self._mapping.madvise(mmap.MADV_DONTNEED, self._start + offset, nbytes)

    def close(self) -> None:
        """Lets go of the memory. It is unmapped when the last array that looks into it is gone, so
        that a view kept too long (by a traceback, say) reads old bytes and never a bad address."""
        self.bytes = np.empty(0, np.uint8)
        self._mapping = None


def _advise_huge(mapping: mmap.mmap) -> None:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        # A kernel built without huge pages: the doctor reports it; 4 KiB pages hold the same.
        if error.errno != errno.EINVAL:
            raise


def _populate(mapping: mmap.mmap, start: int, memory: NDArray[np.uint8]) -> None:
    for offset in range(0, memory.size, _CHUNK):
        chunk = memory[offset : offset + _CHUNK]
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start + offset, chunk.size)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise TierError(
                    f"the kernel cannot supply {format_bytes(memory.size)} of memory: "
                    f"{error.strerror}",
                    hint="another program took it meanwhile, or a container limit was hit",
                ) from error
            chunk[:: mmap.PAGESIZE] = 0  # Linux before 5.14: touch each page
