"""Other programs beside the bench: processes that never sleep, of the same niceness."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from moet.base.errors import MachineError

_LOOP = """
import os, sys
print("busy", flush=True)
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy_processes(count: int, cpus: Sequence[int]) -> Iterator[list[int]]:
    """Keeps `count` processes busy inside the block, free to move over `cpus`; yields their ids.

    Raises:
        MachineError: they cannot be started.
    """
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            command = [sys.executable, "-c", _LOOP, str(os.getpid())]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
            os.sched_setaffinity(started[-1].pid, cpus)  # this thread may be pinned
        for process in started:
            if process.stdout is None or process.stdout.readline() != b"busy\n":
                raise MachineError("a busy process did not start", hint="is there memory left?")
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.communicate()
