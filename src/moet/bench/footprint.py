"""Memory of a family of processes while it works: sampled, every page counted.

Private and shared memory are the kernel's proportional sizes: a page that several processes of the
family share counts once over all of them. Pages of mapped files (libraries, mostly) count in full
in each process that maps them: what others on the machine have mapped cannot make them less, and
no figure here is less than what is used. Memory that no process maps, such as the page cache of
files that are read, is not theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from moet.base.errors import MachineError
from moet.machine.cgroup import read_text
from moet.machine.processes import read_stat

INTERVAL_SECONDS = 0.2
ROLLUP = ("Pss_Anon", "SwapPss", "Private_Hugetlb", "Pss_Shmem", "Shared_Hugetlb")


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes that processes use.

    Attributes:
        private: anonymous memory, reserved huge pages and what was swapped out included.
        shared: shared memory.
        file: pages of mapped files, in each process that maps them.
        highest: the processes' own peaks of resident memory since each began, added up. They miss
            nothing between two samples, but count what is shared in every process.
    """

    private: int = 0
    shared: int = 0
    file: int = 0
    highest: int = 0

    @property
    def total(self) -> int:
        """All that is used now."""
        return self.private + self.shared + self.file

    def __add__(self, other: Footprint) -> Footprint:
        sums = map(sum, zip(astuple(self), astuple(other), strict=True))
        return Footprint(**dict(zip(self.__dict__, sums, strict=True)))


def _sizes(text: str) -> dict[str, int]:
    """The lines ``Name:   12 kB`` of a file in /proc, in bytes."""
    lines = (line.split() for line in text.splitlines())
    return {w[0].rstrip(":"): 1024 * int(w[1]) for w in lines if len(w) == 3 and w[2] == "kB"}


def footprint_of(pid: int, root: Path = Path("/")) -> Footprint:
    """What one process uses; nothing when it is gone. See proc_pid_smaps(5), proc_pid_status(5).

    Raises:
        MachineError: the kernel is too old to say it.
    """
    status = _sizes(read_text(root / f"proc/{pid}/status"))
    rollup = _sizes(read_text(root / f"proc/{pid}/smaps_rollup"))
    if not rollup or "VmHWM" not in status:  # gone, a zombie, or half-way there
        return Footprint()
    if not set(ROLLUP) <= set(rollup):
        hint = "a kernel of 5.4 or later has it"
        raise MachineError("/proc/PID/smaps_rollup lacks Pss_Anon", hint=hint)
    sizes = [rollup[name] for name in ROLLUP]
    return Footprint(
        private=sum(sizes[:3]),
        shared=sum(sizes[3:]),
        file=status["RssFile"],
        highest=status["VmHWM"],
    )


def family(pid: int, root: Path = Path("/")) -> list[int]:
    """A process and all that descend from it and whose parents still run."""
    children: dict[int, list[int]] = {}
    for entry in (root / "proc").iterdir():
        if entry.name.isdigit() and (stat := read_stat(entry.name, root)):
            children.setdefault(stat.parent, []).append(int(entry.name))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found


def footprint(pids: Iterable[int], root: Path = Path("/")) -> Footprint:
    """What several processes use together."""
    return sum((footprint_of(pid, root) for pid in pids), Footprint())


class Sampler:
    """Watches a process and its descendants from a thread, in a ``with``.

    Args:
        pid: the eldest.
        interval: seconds between two looks.

    Attributes:
        peak: the look with the largest total since the last ``take``.
        last: the latest look.
        looks: how many there were.
    """

    def __init__(self, pid: int, interval: float = INTERVAL_SECONDS) -> None:
        self.pid, self._interval = pid, interval
        self.peak = self.last = Footprint()
        self.looks = 0
        self._error: Exception | None = None
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="footprint", daemon=True)

    def look(self) -> None:
        """One more sample, now."""
        seen = footprint(family(self.pid))
        with self._lock:
            self.looks += 1
            self.last = seen
            self.peak = max(self.peak, seen, key=lambda f: f.total)

    def take(self) -> Footprint:
        """The peak so far; from here a new one is looked for.

        Raises:
            MachineError: the kernel did not say, or there was no process.
        """
        if self._error is not None:
            raise self._error
        with self._lock:
            peak, self.peak = self.peak, Footprint()
        if peak.total == 0:
            hint = f"is /proc/{self.pid}/smaps_rollup readable? Does the process run?"
            raise MachineError("no memory of the process was seen", hint=hint)
        return peak

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._interval):
                self.look()
        except Exception as error:  # for whoever takes the result
            self._error = error

    def __enter__(self) -> Self:
        self.look()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
