"""Checking: whatever byte is wrong is found and its record named."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moet.base.errors import UsageError
from moet.checkpoint import Checkpoint, open_checkpoint
from moet.checkpoint.keys import ExpertKey
from moet.pack import blockfile
from moet.pack.check import check_pack
from moet.pack.faults import BrokenPack, PackFault
from moet.pack.reader import Pack, open_pack
from moet.pack.spec import MANIFEST, Manifest, checksum_of
from moet.pack.writer import write_pack
from moet.testing.toy import write_toy_checkpoint


def flip(file: Path, offset: int, mask: int = 1) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ mask]))


def test_a_good_pack_passes(toy: Checkpoint, packed: Path) -> None:
    seen: list[tuple[int, int]] = []
    pack = open_pack(packed)
    report = check_pack(pack, progress=lambda done, total: seen.append((done, total)))
    assert report.passed
    assert not report.compared
    assert (report.records, report.nbytes) == (len(pack), pack.nbytes)
    assert seen[-1] == (pack.nbytes, pack.nbytes)
    compared = check_pack(pack, toy, threads=1)
    assert compared.passed
    assert compared.compared


def test_bad_records_are_named_in_order(packed: Path) -> None:
    pack = open_pack(packed)
    keys = [ExpertKey(1, 5), ExpertKey(0, 1), ExpertKey(0, 4)]
    for key in keys:
        place = pack.place(key)
        flip(pack.files[place.file], place.offset + place.nbytes - 1)
    report = check_pack(pack)
    assert not report.passed
    assert [bad.key for bad in report.bad] == sorted(keys)
    for bad in report.bad:
        place = pack.place(bad.key)
        assert (bad.file, bad.offset) == (pack.files[place.file], place.offset)
        assert "do not match the checksum" in bad.what
        assert bad.as_dict()["layer"] == bad.key.layer


def test_each_changed_byte_of_a_small_pack_is_found(tmp_path: Path) -> None:
    """Every byte of every record, padding included, in the file itself."""
    write_toy_checkpoint(tmp_path / "m", hidden=32, intermediate=32, experts=2, layers=1, top_k=1)
    pack = open_pack(write_pack(open_checkpoint(tmp_path / "m"), [tmp_path]).folder)
    (file,), size = pack.files, pack.layout.record_bytes
    content = np.fromfile(file, np.uint8)
    assert content.size == 2 * size == pack.nbytes
    with file.open("r+b", buffering=0) as stream:
        for i in range(content.size):
            key = ExpertKey(0, i // size)
            os.pwrite(stream.fileno(), bytes([content[i] ^ (1 << i % 8)]), i)
            record = np.frombuffer(os.pread(stream.fileno(), size, i // size * size), np.uint8)
            assert not pack.matches(key, record), i
            os.pwrite(stream.fileno(), bytes([content[i]]), i)
    assert check_pack(pack).passed


@pytest.mark.parametrize("place", [0, 4096, -1, -4096])
def test_flips_in_every_part_are_found_by_the_check(place: int, packed: Path) -> None:
    pack = open_pack(packed)
    for file in pack.files:
        flip(file, place % file.stat().st_size, 0x80)
    assert len(check_pack(pack).bad) == 2


def test_records_that_changed_places_are_found(packed: Path) -> None:
    pack = open_pack(packed)
    (file, *_), size = pack.files, pack.layout.record_bytes
    raw = file.read_bytes()
    file.write_bytes(raw[size : 2 * size] + raw[:size] + raw[2 * size :])
    assert len(check_pack(pack).bad) == 2


def test_files_that_changed_places_are_found(packed: Path) -> None:
    pack = open_pack(packed)
    first, second = pack.files
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    second.write_bytes(data[0])
    assert len(check_pack(open_pack(packed)).bad) == len(pack)


def sign_again(pack: Pack, key: ExpertKey) -> None:
    """A manifest that takes a record as it lies in the file for right."""
    place, index = pack.place(key), pack.plan.index(key)
    data = np.fromfile(pack.files[place.file], np.uint8)[place.offset :][: place.nbytes]
    checksums = list(pack.manifest.checksums)
    assert index is not None
    checksums[index] = checksum_of(data)
    manifest = Manifest(plan=pack.plan, checksums=tuple(checksums))
    (pack.folder / MANIFEST).write_bytes(manifest.to_bytes())


def test_only_the_checkpoint_tells_of_wrong_bytes_with_a_right_checksum(
    toy: Checkpoint, packed: Path
) -> None:
    pack, key = open_pack(packed), ExpertKey(1, 2)
    place = pack.place(key)
    flip(pack.files[place.file], place.offset + 7)
    sign_again(pack, key)
    pack = open_pack(packed)
    assert check_pack(pack).passed
    (bad,) = check_pack(pack, toy).bad
    assert bad.key == key
    assert "not those of the checkpoint" in bad.what


def test_a_record_that_cannot_be_read_is_named_and_the_check_goes_on(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, preadv = open_pack(packed), os.preadv
    place = pack.place(ExpertKey(0, 3))

    def failing(fd: int, buffers: Any, offset: int) -> int:
        if offset == place.offset and os.readlink(f"/proc/self/fd/{fd}") == str(
            pack.files[place.file]
        ):
            raise OSError(errno.EIO, "Input/output error")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(blockfile.os, "preadv", failing)
    (bad,) = check_pack(pack).bad
    assert bad.key == ExpertKey(0, 3)
    assert "Input/output error" in bad.what


def test_a_file_that_is_cut_under_us_is_named(packed: Path) -> None:
    pack = open_pack(packed)
    os.truncate(pack.files[0], pack.files[0].stat().st_size - 1)
    (bad,) = check_pack(pack).bad
    assert "it ends at byte" in bad.what


def test_bytes_are_verified_by_key(packed: Path) -> None:
    pack = open_pack(packed)
    place = pack.place(ExpertKey(1, 1))
    data = np.fromfile(pack.files[place.file], np.uint8)[place.offset :][: place.nbytes].copy()
    pack.verify(ExpertKey(1, 1), data)
    for wrong in (lambda: pack.verify(ExpertKey(1, 0), data), lambda: spoiled(pack, data)):
        with pytest.raises(BrokenPack) as caught:
            wrong()
        assert caught.value.fault is PackFault.BAD_RECORD
        assert "layer 1" in str(caught.value)


def spoiled(pack: Pack, data: Any) -> None:
    data[0] ^= 1
    pack.verify(ExpertKey(1, 1), data)


def test_fewer_threads_than_none_are_refused(packed: Path) -> None:
    with pytest.raises(UsageError):
        check_pack(open_pack(packed), threads=-1)


def test_a_checkpoint_of_another_geometry_is_not_compared(packed: Path, tmp_path: Path) -> None:
    write_toy_checkpoint(tmp_path / "wide", hidden=320, intermediate=96, experts=6, layers=2)
    with pytest.raises(BrokenPack) as caught:
        check_pack(open_pack(packed), open_checkpoint(tmp_path / "wide"))
    assert caught.value.fault is PackFault.OTHER_MODEL


def test_the_threads_errors_are_ours(
    toy: Checkpoint, packed: Path, copied: Callable[[Path], Path]
) -> None:
    """A checkpoint that vanishes meanwhile is an error of the check, not a bad record."""
    other = open_checkpoint(copied(toy.folder))
    for file in other.shards.files:
        file.unlink()
    with pytest.raises(Exception, match="cannot be read"):
        check_pack(open_pack(packed), other)
