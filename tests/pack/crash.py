"""Kills writers of a pack, by number of the call or by time, and looks at what they leave.

python -m tests.pack.crash CHECKPOINT FOLDER calls        every call that changes the disk, in turn
python -m tests.pack.crash CHECKPOINT FOLDER times N      N moments, drawn at random

A process of its own, so that it can fork: nothing here has started a thread. A child that is killed
runs no clean-up of Python's.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moet.checkpoint import Checkpoint, open_checkpoint
from moet.pack import blockfile, writer
from moet.pack.faults import BrokenPack, PackFault
from moet.pack.reader import open_pack
from moet.pack.writer import write_pack

CALLS = ("open", "pwrite", "write", "ftruncate", "fdatasync", "fsync", "mkdir", "replace", "unlink")


def in_child(work: Callable[[], object]) -> int:
    """Forks; returns the child's id. The child leaves without any clean-up."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def reap(child: int) -> bool:
    """Waits; whether the child came to its end by itself."""
    _, status = os.waitpid(child, 0)
    return os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0


def die_at(count: int, half: bool) -> None:
    """This process dies at its ``count``-th change of the disk, before it or half through it."""
    seen = 0

    def wrap(call: str) -> None:
        original = getattr(os, call)

        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == count:
                if half and call in {"pwrite", "write"}:
                    data = arguments[1]
                    size = len(data) // 2 // 4096 * 4096 if call == "pwrite" else len(data) // 2
                    original(arguments[0], data[:size], *arguments[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(os, call, counted)

    for call in CALLS:
        wrap(call)


def judge(checkpoint: Checkpoint, place: Path, wanted: dict[str, bytes]) -> bool:
    """Whether the pack is there; where it is, it is right. Stops the program where it is not."""
    (folder,) = list(place.iterdir()) or [place / "none"]
    try:
        open_pack(folder, checkpoint)
    except BrokenPack as error:
        if error.fault not in (PackFault.UNFINISHED, PackFault.NO_PACK):
            raise
        return False
    found = {name: (folder / name).read_bytes() for name in wanted}
    if found != wanted:
        raise SystemExit(f"a wrong pack was accepted: {folder}")
    return True


def finish(checkpoint: Checkpoint, place: Path, wanted: dict[str, bytes]) -> None:
    """The next run comes to the end, whatever the killed one has left."""
    if not reap(in_child(lambda: write_pack(checkpoint, [place], threads=1))):
        raise SystemExit("the next run failed")
    if not judge(checkpoint, place, wanted):
        raise SystemExit("the next run left no pack")


def each_call(checkpoint: Checkpoint, root: Path, wanted: dict[str, bytes]) -> int:
    """Dies at every call in turn; returns how often."""
    kills = 0
    for half in (False, True):
        for count in range(1, 1000):
            place = root / "calls"
            place.mkdir()

            def work(count: int = count, half: bool = half, place: Path = place) -> None:
                die_at(count, half)
                write_pack(checkpoint, [place], threads=1)

            survived = reap(in_child(work))
            judge(checkpoint, place, wanted)
            finish(checkpoint, place, wanted)
            shutil.rmtree(place)
            if survived:
                break
            kills += 1
    return kills


def each_time(checkpoint: Checkpoint, root: Path, wanted: dict[str, bytes], kills: int) -> int:
    """Kills at random moments, again and again the same pack until it is whole; returns wholes."""
    draw, wholes = random.Random(4), 0
    pwrite = os.pwrite

    def slow(*arguments: Any) -> int:
        time.sleep(0.002)
        return pwrite(*arguments)

    def work() -> None:
        blockfile.os.pwrite = slow  # type: ignore[assignment]
        write_pack(checkpoint, [root / "times"], threads=2)

    (root / "times").mkdir()
    for _ in range(kills):
        child = in_child(work)
        time.sleep(draw.uniform(0.0, 0.12))
        os.kill(child, signal.SIGKILL)
        reap(child)
        if judge(checkpoint, root / "times", wanted):
            wholes += 1
            shutil.rmtree(root / "times")
            (root / "times").mkdir()
    finish(checkpoint, root / "times", wanted)
    return wholes


def main(model: str, root: Path, mode: str, *count: str) -> None:
    """Prints what was done."""
    checkpoint = open_checkpoint(model)
    writer._COMMIT_S = 0.0  # after every record: more moments that differ
    writer.check_space = lambda plan, home: None  # type: ignore[assignment]
    if not reap(in_child(lambda: write_pack(checkpoint, [root / "whole"], threads=1))):
        raise SystemExit("no pack to compare with")
    (folder,) = (root / "whole").iterdir()
    wanted = {name: (folder / name).read_bytes() for name in ("manifest.json", "experts-0.bin")}
    if mode == "calls":
        sys.stdout.write(f"{each_call(checkpoint, root, wanted)} kills\n")
    else:
        wholes = each_time(checkpoint, root, wanted, int(count[0]))
        sys.stdout.write(f"{wholes} wholes\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
