"""Processes of this user: when they started, what environment they have, what they map.

A pid alone names nothing for long: numbers are reused. Pid, start time and boot id together do.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moet.machine.cgroup import read_text

PR_SET_PDEATHSIG = 1
SHARED_MEMORY = "dev/shm"


@dataclass(frozen=True, order=True)
class Process:
    """A process, named so that the name cannot come to mean another one.

    Attributes:
        pid: its number.
        started: clock ticks after boot (field 22 of proc_pid_stat(5)).
    """

    pid: int
    started: int


@dataclass(frozen=True, kw_only=True)
class Stat:
    """The fields of /proc/PID/stat that moet uses."""

    state: str
    parent: int
    started: int


def boot_id(root: Path = Path("/")) -> str:
    """A random name that the kernel picks at every boot."""
    return read_text(root / "proc/sys/kernel/random/boot_id")


def read_stat(pid: int | str, root: Path = Path("/")) -> Stat | None:
    """The state of a process; None when there is none. The command may hold spaces and ')'."""
    text = read_text(root / f"proc/{pid}/stat")
    if not text:
        return None
    rest = text.rpartition(")")[2].split()
    return Stat(state=rest[0], parent=int(rest[1]), started=int(rest[19]))


def identify(pid: int, root: Path = Path("/")) -> Process | None:
    """The full name of a running process; None when it is gone or only a zombie."""
    stat = read_stat(pid, root)
    return Process(pid, stat.started) if stat and stat.state not in "ZX" else None


def is_alive(process: Process, root: Path = Path("/")) -> bool:
    """Whether this very process still runs."""
    return identify(process.pid, root) == process


def _pids(root: Path) -> Iterator[int]:
    yield from (int(entry.name) for entry in (root / "proc").iterdir() if entry.name.isdigit())


def with_variable(name: str, value: str, root: Path = Path("/")) -> list[Process]:
    """Running processes of this user that were started with ``name=value`` in the environment.

    A process that rewrites its title must leave the environment alone to be found (for the
    setproctitle package: SPT_NOENV).
    """
    entry = f"{name}={value}".encode()
    return sorted(
        found
        for pid in _pids(root)
        if entry in _environment(pid, root) and (found := identify(pid, root))
    )


def _environment(pid: int, root: Path) -> list[bytes]:
    try:
        return (root / f"proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def mapped_shared_memory(pid: int, root: Path = Path("/")) -> set[str]:
    """Names under /dev/shm that a process has mapped or open."""
    names = set()
    for line in read_text(root / f"proc/{pid}/maps").splitlines():
        path = line.split(maxsplit=5)[5] if line.count("/") else ""
        if path.startswith(f"/{SHARED_MEMORY}/"):
            names.add(path.removeprefix(f"/{SHARED_MEMORY}/").removesuffix(" (deleted)"))
    return names


def command_line(pid: int, root: Path = Path("/")) -> str:
    """The command of a process, words separated by blanks."""
    return read_text(root / f"proc/{pid}/cmdline").replace("\0", " ").strip()


def kill(process: Process, number: int = signal.SIGKILL) -> bool:
    """Sends a signal to this very process; False when it is gone (or was replaced)."""
    if not is_alive(process):
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Asks the kernel to send us ``number`` when the thread that started us ends. prctl(2)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
