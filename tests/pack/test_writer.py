"""Writing: the bits of memory, whatever happens on the way; nothing that opens and is wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moet.base.errors import FormatError, UsageError
from moet.checkpoint import BrokenCheckpoint, Checkpoint, Fault, open_checkpoint
from moet.checkpoint.keys import ExpertKey
from moet.pack import blockfile, writer
from moet.pack.blockfile import BlockFile, aligned_buffer
from moet.pack.check import check_pack
from moet.pack.faults import BrokenPack, PackFault
from moet.pack.journal import JOURNAL
from moet.pack.reader import open_pack
from moet.pack.spec import MANIFEST
from moet.pack.writer import write_pack
from moet.testing.toy import FAMILIES, write_toy_checkpoint

from .conftest import SIZES
from .helpers import content, in_memory, records

RECORDS = SIZES["experts"] * SIZES["layers"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("disks", [1, 3])
def test_records_are_those_of_memory(
    family: str, disks: int, toys: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(toys[family])
    report = write_pack(checkpoint, [tmp_path / f"disk{i}" for i in range(disks)])
    pack = open_pack(report.folder, checkpoint)
    assert (report.records, report.kept, report.nbytes) == (RECORDS, 0, pack.nbytes)
    assert records(pack) == in_memory(checkpoint)
    assert len(pack) == RECORDS
    assert len(pack.files) == disks
    sizes = [file.stat().st_size for file in pack.files]
    assert sizes == [RECORDS // disks * pack.layout.record_bytes] * disks
    assert {file.parent.parent.name for file in pack.files} == {f"disk{i}" for i in range(disks)}
    assert sorted(path.name for path in report.folder.iterdir()) == [
        "experts-0.bin",
        "lock",
        MANIFEST,
    ]


def test_the_same_checkpoint_makes_the_same_pack(toy: Checkpoint, tmp_path: Path) -> None:
    first = content(write_pack(toy, [tmp_path / "x"], threads=1).folder)
    second = content(write_pack(toy, [tmp_path / "y"], threads=7, drop_cache=True).folder)
    assert first == second


def test_without_direct_io(
    toy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = content(write_pack(toy, [tmp_path / "x"]).folder)
    open_ = os.open

    def refusing(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_(path, flags, mode)

    monkeypatch.setattr(blockfile.os, "open", refusing)
    report = write_pack(toy, [tmp_path / "y"])
    assert not report.direct
    assert content(report.folder) == wanted
    assert check_pack(open_pack(report.folder)).passed


def test_direct_io_that_is_refused_late(
    toy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = content(write_pack(toy, [tmp_path / "x"]).folder)
    fcntl, pwrite, preadv = blockfile.fcntl, os.pwrite, os.preadv

    def refuse(fd: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")

    def writing(fd: int, data: Any, offset: int) -> int:
        refuse(fd)
        return pwrite(fd, data[:5000], offset)  # and in pieces that end anywhere

    def reading(fd: int, buffers: Any, offset: int) -> int:
        refuse(fd)
        return preadv(fd, [buffers[0][:7000]], offset)

    monkeypatch.setattr(blockfile.os, "pwrite", writing)
    monkeypatch.setattr(blockfile.os, "preadv", reading)
    report = write_pack(toy, [tmp_path / "y"])
    assert content(report.folder) == wanted
    assert check_pack(open_pack(report.folder)).passed


@pytest.mark.parametrize("name", ["preadv", "pwrite"])
def test_threads_that_are_refused_together_all_try_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both calls are refused; one is told so when the other has taken O_DIRECT away already."""
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    plain, both, local = getattr(os, name), threading.Barrier(2, timeout=60), threading.local()

    def refusing(fd: int, data: Any, offset: int) -> int:
        if not hasattr(local, "refused"):
            local.refused = True
            if both.wait():
                while file.direct:
                    time.sleep(0.001)
            raise OSError(errno.EINVAL, "Invalid argument")
        return int(plain(fd, data, offset))

    with BlockFile(path, write=True) as file, ThreadPoolExecutor(2) as threads:
        file.direct = True  # whatever this filesystem says
        monkeypatch.setattr(blockfile.os, name, refusing)
        call = file.read if name == "preadv" else file.write
        calls = [threads.submit(call, aligned_buffer(4096), at) for at in (0, 4096)]
        assert [done.result() for done in calls] == [None, None]
        assert not file.direct


def test_a_pack_that_is_there_is_left_alone(toy: Checkpoint, tmp_path: Path) -> None:
    folder = write_pack(toy, [tmp_path]).folder
    (folder / JOURNAL).write_bytes(b"of a run that was killed after its manifest")
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    report = write_pack(toy, [tmp_path])
    assert (report.folder, report.kept) == (folder, RECORDS)
    after = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert after == {name: time for name, time in before.items() if name != JOURNAL}
    with open_pack(folder).hold():  # in use is no obstacle
        assert write_pack(toy, [tmp_path]).kept == RECORDS


def test_progress_reaches_the_total(toy: Checkpoint, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = write_pack(toy, [tmp_path], progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (report.nbytes, report.nbytes)
    assert seen == sorted(seen)
    assert report.rate > 0


def test_what_is_not_ours_is_not_written_over(toy: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / write_pack(toy, [tmp_path / "whole"]).folder.name
    for name in ("experts-0.bin", "thesis.txt"):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("the only copy")
        with pytest.raises(BrokenPack, match=name) as caught:
            write_pack(toy, [tmp_path])
        assert caught.value.fault is PackFault.FOREIGN
        assert (folder / name).read_text() == "the only copy"
        (folder / name).unlink()


def test_a_second_disk_that_holds_another_packs_part_is_named(
    toy: Checkpoint, tmp_path: Path
) -> None:
    folder = write_pack(toy, [tmp_path / "a", tmp_path / "shared"]).folder
    with pytest.raises(BrokenPack, match=r"experts-1\.bin") as caught:
        write_pack(toy, [tmp_path / "b", tmp_path / "shared"])
    assert caught.value.fault is PackFault.FOREIGN
    assert check_pack(open_pack(folder)).passed


def test_two_writers_do_not_clash(toy: Checkpoint, tmp_path: Path) -> None:
    """The second is refused while the first writes, whichever of the folders they share."""
    refused: list[PackFault] = []

    def second(done: int, total: int) -> None:
        if not refused:
            for places in (["a", "b"], ["a"], ["c", "b"]):
                with pytest.raises(BrokenPack) as caught:
                    write_pack(toy, [tmp_path / place for place in places])
                refused.append(caught.value.fault)

    report = write_pack(toy, [tmp_path / "a", tmp_path / "b"], progress=second)
    assert refused == [PackFault.IN_USE] * 3
    assert check_pack(open_pack(report.folder), toy).passed


def test_records_are_synced_before_the_journal_tells_of_them(
    toy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the journal before the manifest, and every folder before its manifest opens."""
    events: list[str] = []

    def name_of(fd: int) -> str:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        return "folder" if path.is_dir() else path.name.removesuffix(".partial")

    def noting(module: Any, call: str) -> None:
        original = getattr(os, call)

        def noted(fd: int, *rest: Any) -> Any:
            result = original(fd, *rest)
            events.append(f"{call} {name_of(fd)}")
            return result

        monkeypatch.setattr(module, call, noted)

    for call in ("pwrite", "write", "fdatasync", "fsync"):
        noting(os, call)
    monkeypatch.setattr(writer, "_COMMIT_S", 0.0)
    write_pack(toy, [tmp_path], threads=1)
    assert events[:2] == ["fsync journal", "fsync folder"]
    assert events[-2:] == ["fsync manifest.json", "fsync folder"]
    first = events.index("pwrite experts-0.bin")
    assert events[2:first] == ["fsync folder"] * 2
    unsynced = 0
    for event in events[first:]:
        unsynced += event == "pwrite experts-0.bin"
        if event == "fdatasync experts-0.bin":
            unsynced = 0
        assert event != "write journal" or unsynced == 0
    assert "fdatasync journal" in events[first:]


def test_a_disk_that_is_too_small_is_told_first(
    toy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = SimpleNamespace(f_bavail=writer.SPARE_BYTES // 4096 + 100, f_frsize=4096)
    monkeypatch.setattr(writer.os, "statvfs", lambda path: small)
    with pytest.raises(BrokenPack) as caught:
        write_pack(toy, [tmp_path / "x"])
    assert caught.value.fault is PackFault.NO_SPACE
    assert "480.00 KiB are to be written and 64.39 MiB are free" in str(caught.value)
    assert not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_made_is_named(toy: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BrokenPack) as caught:
        write_pack(toy, [tmp_path / "file" / "packs"])
    assert caught.value.fault is PackFault.WRITE_FAILED


@pytest.mark.parametrize("places", [[], ["x", "x"], ["x", "y/../x"], ["x\udcff"]])
def test_folders_that_make_no_sense_are_named(
    places: list[str], toy: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        write_pack(toy, [tmp_path / place for place in places])
    assert caught.value.hint


def test_fewer_threads_than_none_are_refused(toy: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        write_pack(toy, [tmp_path], threads=-1)


def test_a_checkpoint_that_changes_meanwhile_makes_no_pack(mine: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(mine)

    def touch(done: int, total: int) -> None:
        os.utime(mine / "model.safetensors", ns=(1, 1))

    with pytest.raises(BrokenPack, match="written again") as caught:
        write_pack(checkpoint, [tmp_path / "x"], progress=touch)
    assert caught.value.fault is PackFault.CHANGED
    assert not list(tmp_path.glob("x/*/manifest.json"))


def test_a_checkpoint_that_changed_before_it_was_identified_makes_no_pack(
    mine: Path, tmp_path: Path
) -> None:
    """Offsets of one state of a file must not be used on another."""
    checkpoint = open_checkpoint(mine)
    file = mine / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    names = [name for name in header if "experts.1.down_proj.weight_packed" in name]
    spans = [header[name]["data_offsets"] for name in names]
    header[names[0]]["data_offsets"], header[names[1]]["data_offsets"] = spans[1], spans[0]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    file.write_bytes(raw[:8] + text + raw[8 + length :])
    with pytest.raises(BrokenPack, match="headers") as caught:
        write_pack(checkpoint, [tmp_path / "x"])
    assert caught.value.fault is PackFault.CHANGED
    assert not list(tmp_path.glob("x/*/manifest.json"))
    write_pack(open_checkpoint(mine), [tmp_path / "y"])


def test_a_checkpoint_that_is_cut_is_named(mine: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(mine)
    size = (mine / "model.safetensors").stat().st_size
    os.truncate(mine / "model.safetensors", size // 2)
    with pytest.raises(BrokenCheckpoint) as caught:
        write_pack(checkpoint, [tmp_path / "x"])
    assert caught.value.fault in (Fault.TRUNCATED, Fault.HEADER_PAST_END)


def test_a_reserved_scale_is_named(mine: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(mine)
    raw = bytearray((mine / "model.safetensors").read_bytes())
    raw[checkpoint.expert_tensors(1, 4).down.scales.offset] = 255
    (mine / "model.safetensors").write_bytes(raw)
    with pytest.raises(FormatError, match=r"experts\.4\.down_proj\.weight_scale\[0, 0\]"):
        write_pack(open_checkpoint(mine), [tmp_path / "x"])
    assert not list(tmp_path.glob("x/*/manifest.json"))


def test_hashed_contents_know_a_copy(
    mine: Path, tmp_path: Path, copied: Callable[[Path], Path]
) -> None:
    folder = write_pack(open_checkpoint(mine), [tmp_path / "x"], hash_contents=True).folder
    file = copied(mine) / "model.safetensors"
    os.utime(file, ns=(1, 1))
    copy = open_checkpoint(file.parent)
    with pytest.raises(BrokenPack, match="written again"):
        open_pack(folder, copy)
    open_pack(folder, copy, full=True)
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(BrokenPack, match=r"the bytes of model\.safetensors are others") as caught:
        open_pack(folder, copy, full=True)
    assert caught.value.fault is PackFault.STALE


def test_hashes_are_added_to_a_pack_that_is_there(
    mine: Path, tmp_path: Path, copied: Callable[[Path], Path]
) -> None:
    checkpoint, places = open_checkpoint(mine), [tmp_path / "x", tmp_path / "y"]
    folder = write_pack(checkpoint, places).folder
    before = records(open_pack(folder))
    with open_pack(folder).hold(), pytest.raises(BrokenPack) as caught:
        write_pack(checkpoint, places, hash_contents=True)
    assert caught.value.fault is PackFault.IN_USE
    for _ in range(2):
        assert write_pack(checkpoint, places[:1], hash_contents=True).kept == RECORDS
        os.utime(copied(mine) / "model.safetensors", ns=(1, 1))
        pack = open_pack(folder, open_checkpoint(tmp_path / "copies" / "mine"), full=True)
        assert records(pack) == before
        shutil.rmtree(tmp_path / "copies")


def test_a_pack_without_hashes_knows_no_copy(
    mine: Path, tmp_path: Path, copied: Callable[[Path], Path]
) -> None:
    folder = write_pack(open_checkpoint(mine), [tmp_path / "x"]).folder
    os.utime(copied(mine) / "model.safetensors", ns=(1, 1))
    with pytest.raises(BrokenPack) as caught:
        open_pack(folder, open_checkpoint(tmp_path / "copies" / "mine"), full=True)
    assert caught.value.fault is PackFault.STALE


def test_files_are_closed(toy: Checkpoint, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    write_pack(toy, [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(BrokenPack):
        write_pack(toy, [tmp_path / "c", tmp_path / "b"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_expert_that_is_not_there_is_named(packed: Path) -> None:
    pack = open_pack(packed)
    assert ExpertKey(1, 5) in pack
    for key in (ExpertKey(1, 6), ExpertKey(2, 0)):
        assert key not in pack
        with pytest.raises(BrokenPack) as caught:
            pack.place(key)
        assert caught.value.fault is PackFault.NO_RECORD


MEASURED = r"""
import re, sys
from pathlib import Path
from moet.checkpoint import open_checkpoint
from moet.pack.check import check_pack
from moet.pack.reader import open_pack
from moet.pack.writer import write_pack
checkpoint = open_checkpoint(sys.argv[1])
report = write_pack(checkpoint, [Path(sys.argv[2])], threads=4)
check_pack(open_pack(report.folder), checkpoint, threads=4)
# Not ru_maxrss: that of a child begins with its parent's.
peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
print(report.nbytes, int(peak[1]) * 1024)
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    peaks = []
    for experts in (8, 96):
        sizes = {"hidden": 1024, "intermediate": 768, "layers": 1, "vocab": 32}
        write_toy_checkpoint(tmp_path / f"m{experts}", experts=experts, **sizes)
        where = [str(tmp_path / f"m{experts}"), str(tmp_path / "packs")]
        command = [sys.executable, "-c", MEASURED, *where]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peaks.append(tuple(map(int, done.stdout.split())))
    (_, small), (nbytes, large) = peaks
    assert nbytes > 120e6
    assert large - small < 16 << 20
    assert large < 256 << 20


def test_the_demo_model(tmp_path: Path) -> None:
    from moet import demo

    checkpoint = open_checkpoint(demo.path())
    report = write_pack(checkpoint, [tmp_path])
    assert report.records == 192
    assert check_pack(open_pack(report.folder, checkpoint), checkpoint).passed
    assert records(open_pack(report.folder)) == in_memory(checkpoint)
    assert json.loads((report.folder / MANIFEST).read_text())["model"]["experts"] == 32
