"""Runs that were stopped: what is whole is kept, what is not is written again."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from moet.checkpoint import Checkpoint
from moet.pack import blockfile, writer
from moet.pack.faults import BrokenPack, PackFault
from moet.pack.journal import JOURNAL, read_journal
from moet.pack.reader import open_pack
from moet.pack.writer import write_pack

from .conftest import SIZES
from .helpers import Stop, finish, interrupted, records, stop_after

RECORDS = SIZES["experts"] * SIZES["layers"]


@pytest.mark.parametrize("count", [0, 1, 5, 11])
@pytest.mark.parametrize("disks", [1, 2])
def test_a_stopped_run_goes_on(
    count: int, disks: int, toy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / f"disk{i}" for i in range(disks)]
    wanted = records(open_pack(write_pack(toy, [tmp_path / "whole"]).folder))
    stop_after(count, monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        write_pack(toy, places, threads=1)
    monkeypatch.undo()
    (folder,) = places[0].iterdir()
    with pytest.raises(BrokenPack) as caught:
        open_pack(folder)
    assert caught.value.fault is PackFault.UNFINISHED
    assert len(read_journal(folder)[1]) == count
    written = stop_after(99, monkeypatch, Stop())
    report = write_pack(toy, places)
    assert (report.folder, report.kept, written()) == (folder, count, RECORDS - count)
    assert records(open_pack(folder, toy)) == wanted


def test_records_that_the_disk_has_lost_are_written_again(toy: Checkpoint, tmp_path: Path) -> None:
    folder = interrupted(toy, tmp_path / "x")
    plan, journalled = read_journal(folder)
    lost = sorted(journalled)[:2]
    with (folder / "experts-0.bin").open("r+b") as stream:
        for index in lost:
            stream.seek(plan.place(index)[1] + 100)
            stream.write(b"lost")
    assert finish(toy, tmp_path / "x").kept == 4


@pytest.mark.parametrize("keep", [0, 4096, 5000])
def test_a_data_file_that_was_cut_is_filled_again(
    keep: int, toy: Checkpoint, tmp_path: Path
) -> None:
    folder = interrupted(toy, tmp_path / "x")
    os.truncate(folder / "experts-0.bin", keep)
    assert finish(toy, tmp_path / "x").kept == 0


def test_a_data_file_that_is_gone_is_written_again(toy: Checkpoint, tmp_path: Path) -> None:
    folder = interrupted(toy, tmp_path / "x")
    (folder / "experts-0.bin").unlink()
    assert finish(toy, tmp_path / "x").kept == 0


@pytest.mark.parametrize(
    ("spoil", "kept"),
    [
        (lambda raw: raw[:-1], 5),  # torn
        (lambda raw: raw[:-20], 5),
        (lambda raw: raw + b"\0" * 37, 6),
        (lambda raw: raw + b"3 00000000000", 6),
        (lambda raw: raw + b"99999 0123456789abcdef 01234567\n", 6),
        (lambda raw: raw[: raw.index(b"\n") + 1], 0),
    ],
)
def test_a_torn_journal_costs_only_what_is_torn(
    spoil: Callable[[bytes], bytes], kept: int, toy: Checkpoint, tmp_path: Path
) -> None:
    folder = interrupted(toy, tmp_path / "x")
    (folder / JOURNAL).write_bytes(spoil((folder / JOURNAL).read_bytes()))
    assert finish(toy, tmp_path / "x").kept == kept


def test_lines_follow_the_last_good_one(toy: Checkpoint, tmp_path: Path) -> None:
    folder = interrupted(toy, tmp_path / "x")
    (folder / JOURNAL).write_bytes((folder / JOURNAL).read_bytes()[:-5])
    interrupted(toy, tmp_path / "x", 3)
    assert len(read_journal(folder)[1]) == 5 + 3
    assert finish(toy, tmp_path / "x").kept == 8


@pytest.mark.parametrize("raw", [b"", b"{", b"{}\n", b'{"format":"moet-pack-9"}\n'])
def test_a_journal_without_a_plan_is_named(raw: bytes, toy: Checkpoint, tmp_path: Path) -> None:
    folder = interrupted(toy, tmp_path)
    (folder / JOURNAL).write_bytes(raw)
    with pytest.raises(BrokenPack) as caught:
        write_pack(toy, [tmp_path])
    assert caught.value.fault is PackFault.BAD_JOURNAL
    assert "moet pack rm" in caught.value.hint


def test_other_folders_than_the_first_time_are_named(toy: Checkpoint, tmp_path: Path) -> None:
    folder = interrupted(toy, tmp_path / "x")
    with pytest.raises(BrokenPack, match="other folders") as caught:
        write_pack(toy, [tmp_path / "x", tmp_path / "y"])
    assert caught.value.fault is PackFault.FOREIGN
    assert len(read_journal(folder)[1]) == 6
    finish(toy, tmp_path / "x")


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (errno.ENOSPC, PackFault.NO_SPACE),
        (errno.EDQUOT, PackFault.NO_SPACE),
        (errno.EIO, PackFault.WRITE_FAILED),
        (errno.EROFS, PackFault.WRITE_FAILED),
    ],
)
@pytest.mark.parametrize("count", [0, 7])
def test_a_disk_that_fails_is_named_and_resumed(
    code: int, fault: PackFault, count: int, toy: Checkpoint, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_after(count, patch, OSError(code, os.strerror(code)))
        with pytest.raises(BrokenPack, match=os.strerror(code)) as caught:
            write_pack(toy, [tmp_path / "x"], threads=3)
    assert caught.value.fault is fault
    assert not list(tmp_path.glob("x/*/manifest.json"))
    assert finish(toy, tmp_path / "x").kept == count


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_a_disk_that_fails_to_sync_is_named(
    call: str, toy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(blockfile.os, call, failing)
    with pytest.raises(BrokenPack, match="Input/output error") as caught:
        write_pack(toy, [tmp_path / "x"])
    assert caught.value.fault is PackFault.WRITE_FAILED
    assert not list(tmp_path.glob("x/*/manifest.json"))
    monkeypatch.undo()
    finish(toy, tmp_path / "x")


def test_what_is_written_already_needs_no_room(
    toy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = interrupted(toy, tmp_path / "x", 9)
    missing = 3 * open_pack(write_pack(toy, [tmp_path / "whole"]).folder).layout.record_bytes
    for free, enough in ((missing - 4096, False), (missing + 65536, True)):
        room = SimpleNamespace(f_bavail=writer.SPARE_BYTES + free, f_frsize=1)
        monkeypatch.setattr(writer.os, "statvfs", lambda path, room=room: room)
        if enough:
            assert write_pack(toy, [tmp_path / "x"]).folder == folder
        else:
            with pytest.raises(BrokenPack):
                write_pack(toy, [tmp_path / "x"])


LIMITED = """
import resource, sys
from pathlib import Path
from moet.checkpoint import open_checkpoint
from moet.pack.writer import write_pack
from moet.pack.faults import BrokenPack
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
try:
    write_pack(open_checkpoint(sys.argv[1]), [Path(sys.argv[2])])
except BrokenPack as error:
    print(error.fault)
"""


def test_a_limit_on_file_sizes_is_named(toy: Checkpoint, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert soft == hard == resource.RLIM_INFINITY or soft > 1 << 20
    command = [sys.executable, "-c", LIMITED, str(toy.folder), str(tmp_path / "x"), "65536"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "write-failed"
    finish(toy, tmp_path / "x")
