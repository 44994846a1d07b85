"""Findings about memory and disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from moet.base import env
from moet.base.report import Finding, Level
from moet.base.units import format_bytes
from moet.machine import Memory

DEMO_BYTES = 1_600 << 20  # the engine with moet-tiny, measured
SHM_BYTES = 512 << 20
DISK_BYTES = 1 << 30


def findings(memory: Memory) -> Iterator[Finding]:
    """RAM, its pages, shared memory, disk."""
    yield _ram(memory)
    yield _pages(memory.transparent_huge)
    if memory.shm_free < SHM_BYTES:
        yield Finding(
            level=Level.WARN,
            topic="/dev/shm",
            fact=f"{format_bytes(memory.shm_free)} free",
            consequence="several workers (--tensor-parallel-size) talk through it and may die",
            fix="containers: --shm-size=1g",
        )
    yield _disk()


def _ram(memory: Memory) -> Finding:
    limit = f", limited to {format_bytes(memory.limit)} by the container" if memory.limit else ""
    fact = f"{format_bytes(memory.available)} of {format_bytes(memory.total)} available{limit}"
    if memory.available >= DEMO_BYTES:
        return Finding(level=Level.OK, topic="memory", fact=fact)
    return Finding(
        level=Level.ERROR,
        topic="memory",
        fact=fact,
        consequence=f"even the demo needs {format_bytes(DEMO_BYTES)}",
        fix="close other programs, or give the container more",
    )


def _pages(setting: str) -> Finding:
    if setting in ("always", "madvise"):
        return Finding(level=Level.OK, topic="huge pages", fact=f"transparent ones: {setting}")
    return Finding(
        level=Level.WARN,
        topic="huge pages",
        fact=f"transparent ones: {setting}",
        consequence="experts lie in 4 KiB pages: slower on large models",
        fix="echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    )


def _disk() -> Finding:
    cache = env.read().cache_dir.expanduser()
    place = next(path for path in (cache, *cache.parents) if path.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        return Finding(
            level=Level.ERROR,
            topic="disk",
            fact=f"{place} is no directory that can be written; {cache} is to be in it",
            consequence="moet serve has no place for its log",
            fix="set MOET_CACHE_DIR to a directory of yours",
        )
    free = shutil.disk_usage(place).free
    fact = f"{format_bytes(free)} free for {cache}"
    if free >= DISK_BYTES:
        return Finding(level=Level.OK, topic="disk", fact=fact)
    return Finding(
        level=Level.WARN,
        topic="disk",
        fact=fact,
        consequence="logs and compiled code may not fit",
        fix="set MOET_CACHE_DIR to a disk with room",
    )
