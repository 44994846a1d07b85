"""Memory: how much there is, how much of it we may take, and in what pages."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from moet.base.errors import MachineError
from moet.machine.cgroup import memory_room, read_text


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory as this process may use it. All sizes in bytes.

    Attributes:
        total: memory of the machine, or the control group's limit where that is less.
        available: what can be taken now without swapping or being killed.
        limit: the control group's limit; None when there is none.
        transparent_huge: the kernel's setting: ``always``, ``madvise``, ``never`` or ``unknown``.
        huge_free: bytes in reserved huge pages that nobody uses.
        memlock: bytes that may be pinned; None: no limit.
        shm_free: free bytes in /dev/shm, which the engine's processes talk through.
    """

    total: int
    available: int
    limit: int | None
    transparent_huge: str
    huge_free: int
    memlock: int | None
    shm_free: int


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo; sizes in bytes, counts as they are. Format: proc_meminfo(5)."""
    values = {}
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        number, *unit = rest.split()
        values[name] = int(number) * (1024 if unit == ["kB"] else 1)
    return values


def _transparent_huge(root: Path) -> str:
    """The word in brackets: ``always [madvise] never``."""
    text = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else "unknown"


def _memlock(root: Path) -> int | None:
    """The soft limit in the line ``Max locked memory   8388608   8388608   bytes``."""
    for line in read_text(root / "proc/self/limits").splitlines():
        if line.startswith("Max locked memory"):
            soft = line.removeprefix("Max locked memory").split()[0]
            return int(soft) if soft.isdigit() else None
    return None


def _shm_free(root: Path) -> int:
    try:
        state = os.statvfs(root / "dev/shm")
    except OSError:
        return 0
    return state.f_bavail * state.f_frsize


def read_memory(root: Path = Path("/")) -> Memory:
    """Looks at the memory.

    Raises:
        MachineError: /proc/meminfo is not there.
    """
    info = _meminfo(root)
    if "MemTotal" not in info:
        raise MachineError("/proc/meminfo cannot be read", hint="moet needs Linux with /proc")
    limit, left = memory_room(root) or (None, info["MemTotal"])
    available = info.get("MemAvailable", info.get("MemFree", 0))
    return Memory(
        total=min(info["MemTotal"], limit or info["MemTotal"]),
        available=min(available, left),
        limit=limit if limit is not None and limit < info["MemTotal"] else None,
        transparent_huge=_transparent_huge(root),
        huge_free=info.get("HugePages_Free", 0) * info.get("Hugepagesize", 0),
        memlock=_memlock(root),
        shm_free=_shm_free(root),
    )
