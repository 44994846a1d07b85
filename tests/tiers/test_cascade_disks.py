"""A cascade over real files on disks with trouble: what is retried, what is named, what goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tests.tiers.disk_records import Disk, write_disk

from moet.testing.faults import EIO, GONE, FaultyReads, Trouble, from_nth_read, nth_read, reads_at
from moet.testing.tiers import PAGE, memory_at
from moet.tiers.api import ExpertKey
from moet.tiers.cascade import Cascade
from moet.tiers.nvme import NvmeTier
from moet.tiers.read_errors import ChecksumError, FileChangedError, ReadError
from moet.tiers.reads import Reader
from moet.tiers.wanted import Wanted

KEYS = [ExpertKey(i // 4, i % 4) for i in range(12)]
SLOT = 2 * PAGE


@contextmanager
def over_disk(folder: Path, slots: int = 6) -> Iterator[tuple[Cascade, FaultyReads, Disk]]:
    disk = write_disk(folder, len(KEYS), SLOT - 50, files=2)
    reads = FaultyReads(Reader("threads"), lambda number, ask: None)
    with NvmeTier(disk, reads=reads) as below, Cascade(below, slots * SLOT) as cascade:
        yield cascade, reads, disk
        assert cascade.stats().leases == 0


def ask(cascade: Cascade, disk: Disk, keys: list[ExpertKey]) -> tuple[set[ExpertKey], Wanted]:
    """What came, whole, and the call."""
    came = set()
    with cascade.want(keys) as call:
        for group in call:
            for lease in group:
                assert np.array_equal(memory_at(lease), disk.records[lease.key])
                came.add(lease.key)
    assert came | call.failed.keys() == set(keys)
    return came, call


def test_one_error_or_one_wrong_bit_is_read_again(tmp_path: Path) -> None:
    for n, trouble in enumerate((EIO, Trouble(flip=7), Trouble(short=100))):
        folder = tmp_path / str(n)
        folder.mkdir()
        with over_disk(folder) as (cascade, reads, disk):
            reads.plan = nth_read(2, trouble)
            came, call = ask(cascade, disk, KEYS[:4])
            assert came == set(KEYS[:4])
            assert not call.failed
            assert reads.troubles == 1


def test_a_bad_block_fails_its_record_and_no_other(tmp_path: Path) -> None:
    for n, (trouble, kind) in enumerate(((EIO, ReadError), (Trouble(flip=3), ChecksumError))):
        folder = tmp_path / str(n)
        folder.mkdir()
        with over_disk(folder) as (cascade, reads, disk):
            bad = disk.places[KEYS[2]].spans[0]
            reads.plan = reads_at(bad.offset + 9, trouble)  # of both files: KEYS[2] and KEYS[3]
            came, call = ask(cascade, disk, KEYS[:6])
            assert came == {KEYS[0], KEYS[1], KEYS[4], KEYS[5]}
            assert all(isinstance(error, kind) for error in call.failed.values())
            assert "experts-0.bin at byte" in str(call.failed[KEYS[2]])
            assert cascade.failed().keys() == {KEYS[2], KEYS[3]}
            troubles = reads.troubles
            assert ask(cascade, disk, [KEYS[2], KEYS[6]])[0] == {KEYS[6]}
            assert reads.troubles == troubles, "it is not asked for again so soon"


def test_with_the_device_gone_what_is_in_memory_goes_on(tmp_path: Path) -> None:
    with over_disk(tmp_path) as (cascade, reads, disk):
        for _ in range(2):
            ask(cascade, disk, KEYS[:3])
        reads.plan = from_nth_read(0, GONE)
        came, call = ask(cascade, disk, KEYS[:8])
        assert came == set(KEYS[:3])
        assert all("device is gone" in error.hint for error in call.failed.values())
        for _ in range(2):
            assert ask(cascade, disk, KEYS[:3])[0] == set(KEYS[:3])
        reads.plan = lambda number, ask: None
        cascade.forgive()
        assert not ask(cascade, disk, KEYS)[1].failed
        assert cascade.failed() == {}


def test_a_slow_disk_is_waited_for_and_the_stall_is_told(tmp_path: Path) -> None:
    with over_disk(tmp_path) as (cascade, reads, disk):
        reads.plan = nth_read(1, Trouble(delay_s=0.3))
        came, call = ask(cascade, disk, KEYS[:2])
        assert came == set(KEYS[:2])
        assert 0.2 < call.stalled_s < 5
        assert cascade.stats().stall_s >= call.stalled_s
        assert cascade.stats().latency.quantile(1.0) > 0.2


def test_a_file_that_is_written_to_fails_its_records(tmp_path: Path) -> None:
    with over_disk(tmp_path) as (cascade, _, disk):
        ask(cascade, disk, KEYS[:2])
        with (tmp_path / "experts-0.bin").open("ab") as stream:
            stream.write(b"x")
        _, call = ask(cascade, disk, KEYS[2:6])
        assert call.failed.keys() == {KEYS[2], KEYS[4]}
        assert all(isinstance(error, FileChangedError) for error in call.failed.values())
