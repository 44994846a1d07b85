"""Limits that a container sets: CPU quota, memory. Control groups v1 and v2, nested ones too.

A limit may stand at any level above us, so every level from our own group up to the mount is read
and the tightest wins. Format: the kernel's cgroup-v1 and cgroup-v2 documents, proc_pid_cgroup(5).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

UNLIMITED_V1 = 1 << 62  # v1 says "no limit" with a number near 2^63


def read_text(path: Path) -> str:
    """The stripped content of a small kernel file; empty when it is not there or not readable."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _own_groups(root: Path) -> dict[str, str]:
    """Controller -> path of our group; the key of the v2 hierarchy is the empty string."""
    groups = {}
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _mounts(root: Path) -> Iterator[tuple[str, str, Path]]:
    """(controller, root of the mount inside the hierarchy, mount point) of every cgroup mount."""
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        mount_root, mount_point = before.split()[3:5]
        kind, *_, options = after.split()
        point = root / mount_point.lstrip("/")
        if kind == "cgroup2":
            yield "", mount_root, point
        elif kind == "cgroup":
            yield from ((name, mount_root, point) for name in options.split(","))


def levels(controller: str, root: Path = Path("/")) -> list[Path]:
    """Directories that may limit us for a controller, ours first, the mount point last.

    A controller that has a v1 mount is not in the v2 hierarchy, so v1 is asked first.
    """
    groups = _own_groups(root)
    for wanted in (controller, ""):
        for name, mount_root, point in _mounts(root):
            if name == wanted and name in groups:
                own = _own_directory(Path(groups[name]), mount_root, point)
                return [own, *(p for p in own.parents if p.is_relative_to(point))]
    return []


def _own_directory(path: Path, mount_root: str, point: Path) -> Path:
    """Our group's directory. Inside a container the path can be the host's: it is taken relative
    to the root of the mount, and where that does not fit either, the mount point is our group."""
    own = point / path.relative_to(mount_root) if path.is_relative_to(mount_root) else point
    return own if own.is_dir() else point


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that we may use, for example 1.5; None when there is no quota."""
    quotas = []
    for level in levels("cpu", root):
        quota, _, period = read_text(level / "cpu.max").partition(" ")
        if not quota:
            quota = read_text(level / "cpu.cfs_quota_us")
            period = read_text(level / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _statistic(level: Path, *names: str) -> int:
    """One line of memory.stat, bytes; 0 when it has none of the names."""
    lines = (line.split() for line in read_text(level / "memory.stat").splitlines())
    values = {line[0]: int(line[1]) for line in lines if len(line) == 2}
    return next((values[name] for name in names if name in values), 0)


def _room(level: Path) -> tuple[int, int] | None:
    """(limit, bytes left under it) of one level; page cache that can be dropped counts as left."""
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, usage = read_text(level / limit_name), read_text(level / usage_name)
        if limit.isdigit() and usage.isdigit() and int(limit) < UNLIMITED_V1:
            reclaimable = _statistic(level, "total_inactive_file", "inactive_file")
            return int(limit), max(0, int(limit) - int(usage) + reclaimable)
    return None


def memory_room(root: Path = Path("/")) -> tuple[int, int] | None:
    """(tightest limit, fewest bytes left at any level); None when memory is not limited."""
    rooms = [room for level in levels("memory", root) if (room := _room(level))]
    if not rooms:
        return None
    return min(limit for limit, _ in rooms), min(left for _, left in rooms)
