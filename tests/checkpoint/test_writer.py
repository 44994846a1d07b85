"""Written folders: whole, deterministic, and never taken for complete before they are."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from moet.base.errors import UsageError
from moet.checkpoint import writer
from moet.checkpoint.faults import BrokenCheckpoint, Fault
from moet.checkpoint.shards import read_shards
from moet.checkpoint.writer import U8, ArraySource, TensorPlan, write_checkpoint


def plan(name: str, count: int, start: int = 0) -> TensorPlan:
    array = np.arange(start, start + count, dtype=np.uint32)
    return TensorPlan(name, "U32", (count,), ArraySource(array))


def test_the_formats_own_library_reads_it(tmp_path: Path) -> None:
    plans = [plan("a", 7), plan("b", 0), plan("c", 1000, 5)]
    write_checkpoint(tmp_path / "x", {"model_type": "none"}, plans)
    got = safetensors.numpy.load_file(tmp_path / "x" / "model.safetensors")
    assert {name: array.tolist() for name, array in got.items()} == {
        "a": list(range(7)),
        "b": [],
        "c": list(range(5, 1005)),
    }
    assert json.loads((tmp_path / "x" / "config.json").read_text()) == {"model_type": "none"}


def test_shards_are_cut_between_tensors(tmp_path: Path) -> None:
    plans = [plan(str(i), 100) for i in range(5)]
    write_checkpoint(tmp_path, {}, plans, shard_bytes=900)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json",
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    shards = read_shards(tmp_path)
    assert shards.findings == ()
    assert [
        len({t.name for t in shards.tensors.values() if t.file == f}) for f in shards.files
    ] == [2, 2, 1]


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, [plan("a", 1), plan("big", 1000), plan("z", 1)], shard_bytes=64)
    assert len(read_shards(tmp_path).files) == 3


def test_chunks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHUNK_BYTES", 12)
    write_checkpoint(tmp_path, {}, [plan("a", 1001)])
    got = safetensors.numpy.load_file(tmp_path / "model.safetensors")["a"]
    assert got.tolist() == list(range(1001))


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    write_checkpoint(
        tmp_path, {}, [plan("a", 10), plan("b", 20)], progress=lambda *now: calls.append(now)
    )
    assert calls == [(40, 120), (120, 120)]


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(BrokenCheckpoint) as caught:
        write_checkpoint(tmp_path, {}, [plan("a", 1)])
    assert caught.value.fault is Fault.NOT_EMPTY
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_leftovers_of_a_broken_run_are_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.partial").write_bytes(b"x" * 10_000)
    write_checkpoint(tmp_path, {}, [plan("a", 3)])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert read_shards(tmp_path).tensors["a"].nbytes == 12


def test_no_space_is_known_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(BrokenCheckpoint, match=r"40 B .* 1\.00 MiB are free") as caught:
        write_checkpoint(tmp_path / "new" / "folder", {}, [plan("a", 10)])
    assert caught.value.fault is Fault.NO_SPACE
    assert "--layers" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


class FailsAt:
    """A source whose disk is full at some byte."""

    def __init__(self, at: int) -> None:
        self.at = at

    def fill(self, out: U8, offset: int) -> None:
        if offset + out.size > self.at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        out[:] = 0


def test_a_disk_that_fills_up_leaves_no_checkpoint(tmp_path: Path) -> None:
    bad = TensorPlan("b", "U8", (100,), FailsAt(50))
    with pytest.raises(BrokenCheckpoint, match="No space left") as caught:
        write_checkpoint(tmp_path, {}, [plan("a", 1), bad])
    assert caught.value.fault is Fault.NO_SPACE
    assert list(tmp_path.iterdir()) == []


class FailsWith:
    """A source that ends with an error."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def fill(self, out: U8, offset: int) -> None:
        raise self.error


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("error", "raised"),
    [(FULL, BrokenCheckpoint), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_run_that_ends_early_takes_its_folders_back(
    tmp_path: Path, error: BaseException, raised: type[BaseException]
) -> None:
    bad = TensorPlan("b", "U8", (100,), FailsWith(error))
    with pytest.raises(raised):
        write_checkpoint(tmp_path / "new" / "folder", {}, [plan("a", 1), bad])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with pytest.raises(raised):
        write_checkpoint(tmp_path / "mine", {}, [plan("a", 1), bad], shard_bytes=50)
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_an_end_between_the_last_names_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "_write_json", fails)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "new", {}, [plan("a", 1), plan("b", 1)], shard_bytes=4)
    assert list(tmp_path.iterdir()) == []


def test_shards_of_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="shards of 0 bytes") as caught:
        write_checkpoint(tmp_path / "new", {}, [plan("a", 1)], shard_bytes=0)
    assert caught.value.hint
    assert list(tmp_path.iterdir()) == []


class KilledError(Exception):
    """Stands for a kill: nobody cleans up after it."""


class KilledAt(FailsAt):
    def fill(self, out: U8, offset: int) -> None:
        del out, offset
        raise KilledError


@pytest.mark.parametrize("victim", range(3))
def test_a_killed_run_never_looks_complete(tmp_path: Path, victim: int) -> None:
    plans: list[Any] = [plan(str(i), 100) for i in range(3)]
    plans[victim] = TensorPlan(str(victim), "U32", (100,), KilledAt(0))
    with pytest.raises(KilledError):
        write_checkpoint(tmp_path, {}, plans, shard_bytes=400)
    assert all(p.name.endswith(".partial") for p in tmp_path.iterdir())
    with pytest.raises(BrokenCheckpoint) as caught:
        read_shards(tmp_path)
    assert caught.value.fault is Fault.NO_WEIGHTS
