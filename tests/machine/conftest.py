from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

BARE_METAL = {
    "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-7\n",
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: Ryzen of the House\n\nprocessor\t: 1\n",
    "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 300 kB\nMemAvailable: 800 kB\n"
    "HugePages_Free: 3\nHugepagesize: 2048 kB\n",
    "proc/self/limits": "Limit  Soft  Hard  Units\nMax locked memory  8388608  8388608  bytes\n",
    "sys/devices/system/cpu/online": "0-7",
    "sys/devices/system/node/node0/cpulist": "0-3",
    "sys/devices/system/node/node1/cpulist": "4-7",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
} | {
    f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}"
    for cpu in range(8)
}

Tree = Callable[[dict[str, str]], Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Writes a fixture tree: a plain machine of 8 logical CPUs on 4 cores, with files on top."""

    def write(extra: dict[str, str]) -> Path:
        for name, content in (BARE_METAL | extra).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return tmp_path

    return write
