"""What several exams of packs share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moet.checkpoint import Checkpoint
from moet.hybrid.load import load, tier_bytes
from moet.pack import blockfile
from moet.pack.reader import Pack
from moet.pack.writer import WriteReport, write_pack
from moet.tiers.ram import RamTier


def content(folder: Path) -> dict[str, bytes]:
    """Name -> bytes of every file of a pack's folder but its lock."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "lock"}


def records(pack: Pack) -> dict[tuple[int, int], bytes]:
    """Every record, read where the pack says."""
    found = {}
    for key in pack.keys():  # noqa: SIM118
        place = pack.place(key)
        with pack.files[place.file].open("rb") as stream:
            stream.seek(place.offset)
            found[key] = stream.read(place.nbytes)
            pack.verify(key, np.frombuffer(found[key], np.uint8))
    return found


def in_memory(checkpoint: Checkpoint) -> dict[tuple[int, int], bytes]:
    """Every record as loading puts it into memory."""
    with RamTier(tier_bytes(checkpoint.geometry), populate=False) as tier:
        load(checkpoint, tier)
        found = {}
        for key in tier.keys():  # noqa: SIM118
            with tier.acquire(key) as lease:
                found[key] = lease.view().tobytes()
        return found


class Stop(Exception):  # noqa: N818
    """What a test raises to stop a run."""


def stop_after(
    count: int, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> Callable[[], int]:
    """Lets ``count`` writes of records pass and later ones fail; returns how many passed."""
    pwrite, done = os.pwrite, [0]

    def failing(fd: int, data: Any, offset: int) -> int:
        if done[0] >= count:
            raise error
        done[0] += 1
        return pwrite(fd, data, offset)

    monkeypatch.setattr(blockfile.os, "pwrite", failing)
    return lambda: done[0]


def interrupted(toy: Checkpoint, place: Path, count: int = 6) -> Path:
    """An unfinished pack with ``count`` records."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(count, patch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            write_pack(toy, [place], threads=1)
    (folder,) = place.iterdir()
    return folder


def finish(toy: Checkpoint, place: Path) -> WriteReport:
    """Goes on, and compares with a pack that was written at once."""
    report = write_pack(toy, [place])
    whole = write_pack(toy, [place.parent / "whole"]).folder
    assert content(report.folder) == content(whole)
    return report
