"""What several exams of packs share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moet.checkpoint import Checkpoint
from moet.hybrid.load import load, tier_bytes
from moet.pack.reader import Pack
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
