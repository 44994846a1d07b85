"""A real pack through the NVMe tier: the bytes that the pack was made of, and its damage named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.tiers.disk_records import memory

from moet.base.errors import TierError
from moet.checkpoint import open_checkpoint
from moet.pack.reader import Pack, open_pack
from moet.pack.writer import write_pack
from moet.testing.toy import write_toy_checkpoint
from moet.tiers.api import ExpertKey
from moet.tiers.nvme import NvmeTier
from moet.tiers.pack_source import PackSource
from moet.tiers.ram import RamTier
from moet.tiers.read_errors import ChecksumError


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    """Two data files."""
    write_toy_checkpoint(tmp_path / "toy", hidden=160, intermediate=96, experts=6, layers=2)
    toy = open_checkpoint(tmp_path / "toy")
    return open_pack(write_pack(toy, [tmp_path / "a", tmp_path / "b"]).folder)


def test_a_pack_reads_back_through_the_tier(pack: Pack) -> None:
    nbytes = pack.layout.record_bytes
    with NvmeTier(PackSource(pack)) as tier:
        keys = list(tier.keys())
        assert len(keys) == len(pack) == 12
        to = {key: memory(nbytes) for key in keys}
        for future in tier.read_many([(key, to[key].ctypes.data) for key in keys]):
            assert future.result(60).verified
        for key in keys:
            place = pack.place(key)
            raw = np.fromfile(pack.files[place.file], np.uint8)
            assert np.array_equal(to[key], raw[place.offset : place.offset + nbytes])


def test_experts_move_from_a_pack_into_memory(pack: Pack) -> None:
    with (
        NvmeTier(PackSource(pack)) as tier,
        RamTier(pack.nbytes, populate=False) as ram,
    ):
        for future in [tier.load(key, ram) for key in tier.keys()]:  # noqa: SIM118
            future.result(60)
        assert set(ram.keys()) == set(pack.keys())
        for key in list(pack.keys()):
            with ram.acquire(key) as lease:
                assert pack.matches(key, lease.view())


def test_a_flipped_bit_is_an_error_of_its_expert(pack: Pack) -> None:
    key = ExpertKey(0, 3)
    place = pack.place(key)
    with pack.files[place.file].open("r+b") as stream:
        stream.seek(place.offset + place.nbytes // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 1]))
    with NvmeTier(PackSource(pack)) as tier, RamTier(pack.nbytes, populate=False) as ram:
        error = tier.load(key, ram).exception(60)
        assert isinstance(error, ChecksumError)
        assert (error.key, error.offset) == (key, place.offset)
        assert key not in ram
        tier.load(ExpertKey(0, 4), ram).result(60)


def test_what_is_not_in_the_pack_is_named(pack: Pack) -> None:
    with NvmeTier(PackSource(pack)) as tier:
        assert ExpertKey(0, 99) not in tier
        with pytest.raises(TierError, match="no record"):
            tier.nbytes(ExpertKey(0, 99))
    with pack.files[1].open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(TierError, match="were expected"):
        NvmeTier(PackSource(pack))
