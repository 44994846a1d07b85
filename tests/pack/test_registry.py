"""Which packs there are, who holds them, and that nothing in use is removed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from moet.checkpoint import Checkpoint, open_checkpoint
from moet.pack import blockfile
from moet.pack.faults import BrokenPack, PackFault
from moet.pack.journal import JOURNAL
from moet.pack.locks import LOCK, FolderLock, is_used
from moet.pack.reader import open_pack
from moet.pack.registry import (
    State,
    default_folder,
    describe,
    find_pack,
    list_packs,
    remove_pack,
    stale_packs,
)
from moet.pack.spec import MANIFEST
from moet.pack.writer import write_pack


def refused(call: Callable[[], object], fault: PackFault) -> None:
    with pytest.raises(BrokenPack) as caught:
        call()
    assert caught.value.fault is fault
    assert caught.value.hint


@pytest.fixture
def unfinished(toy: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pack whose writing was stopped after its first record."""
    pwrite, first = os.pwrite, []

    def once(*arguments: object) -> int:
        if first:
            raise KeyboardInterrupt
        first.append(1)
        return pwrite(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(blockfile.os, "pwrite", once)
        with pytest.raises(KeyboardInterrupt):
            write_pack(toy, [tmp_path / "stopped", tmp_path / "part"], threads=1)
    (folder,) = (tmp_path / "stopped").iterdir()
    return folder


def test_the_default_place_is_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOET_CACHE_DIR", "/somewhere/cache")
    assert default_folder() == Path("/somewhere/cache/packs")


def test_a_pack_is_found_by_its_checkpoint(mine: Path, tmp_path: Path) -> None:
    checkpoint, places = open_checkpoint(mine), [tmp_path / "x", tmp_path / "y"]
    assert find_pack(checkpoint, places) is None
    folder = write_pack(checkpoint, places[1:]).folder
    assert find_pack(checkpoint, places) == folder
    assert stale_packs(checkpoint, places) == []
    os.utime(mine / "model.safetensors", ns=(1, 1))
    refused(lambda: find_pack(checkpoint, places), PackFault.STALE)
    assert describe(folder).state is State.STALE
    newer = write_pack(checkpoint, places[1:]).folder
    assert newer != folder
    assert find_pack(checkpoint, places) == newer
    assert stale_packs(checkpoint, places) == [folder]


def test_an_unfinished_pack_is_not_found(
    toy: Checkpoint, unfinished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_pack(toy, [unfinished.parent]) is None
    assert "not finished" in caplog.text


def test_the_list(toy: Checkpoint, packed: Path, unfinished: Path, tmp_path: Path) -> None:
    damaged = write_pack(toy, [tmp_path / "z"]).folder
    (damaged / MANIFEST).write_bytes(b"{}")
    (tmp_path / "z" / "notes").mkdir()
    places = [packed.parent, tmp_path / "b", unfinished.parent, damaged.parent, tmp_path / "none"]
    entries = list_packs(places)
    assert [entry.folder for entry in entries] == [packed, unfinished, damaged]
    states = [State.COMPLETE, State.UNFINISHED, State.DAMAGED]
    assert [entry.state for entry in entries] == states
    nbytes = open_pack(packed).nbytes
    assert [(e.records, e.total) for e in entries] == [(12, 12), (1, 12), (0, 0)]
    assert entries[0].nbytes >= nbytes
    assert 0 < entries[1].nbytes < nbytes
    assert entries[2].nbytes >= nbytes
    assert [bool(entry.problem) for entry in entries] == [False, False, True]
    assert [entry.source for entry in entries] == [str(toy.folder)] * 2 + [""]
    assert entries[0].as_dict()["state"] == "complete"


def test_a_pack_with_a_lost_disk_is_damaged(packed: Path) -> None:
    open_pack(packed).files[1].unlink()
    entry = describe(packed)
    assert entry.state is State.DAMAGED
    assert "missing-file" in entry.problem


@pytest.mark.parametrize("which", ["packed", "unfinished"])
def test_removal_takes_all_of_it(
    which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(which)
    wanted = describe(folder).nbytes
    assert remove_pack(folder) == wanted > 0
    assert [p for p in tmp_path.rglob("*") if p.name.endswith((".moetpack", ".bin"))] == []
    refused(lambda: open_pack(folder), PackFault.NO_PACK)
    refused(lambda: remove_pack(folder), PackFault.NO_PACK)


def test_removal_leaves_what_is_not_the_packs(packed: Path) -> None:
    (packed / "heat.json").write_text("mine")
    remove_pack(packed)
    assert {path.name for path in packed.iterdir()} == {"heat.json", LOCK}


def test_a_damaged_pack_can_be_removed(
    packed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (packed / MANIFEST).write_bytes(b"{}")
    assert remove_pack(packed) > 0
    assert not packed.exists()
    assert "other folders" in caplog.text
    assert list(tmp_path.glob("b/*/experts-1.bin"))  # nobody could know of it


def test_folders_that_are_no_packs_are_not_removed(tmp_path: Path, packed: Path) -> None:
    part = open_pack(packed).files[1].parent
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / MANIFEST).write_text("{}")
    for folder in (part, tmp_path / "plain", tmp_path / "none"):
        refused(lambda folder=folder: remove_pack(folder), PackFault.NO_PACK)
    assert (tmp_path / "plain" / MANIFEST).exists()
    open_pack(packed)


def test_a_removal_that_was_stopped_can_be_done_again(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, removed = Path.unlink, []

    def failing(path: Path, missing_ok: bool = False) -> None:
        if len(removed) == 1:
            raise PermissionError(13, "Permission denied")
        removed.append(path)
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing)
        refused(lambda: remove_pack(packed), PackFault.WRITE_FAILED)
    refused(lambda: open_pack(packed), PackFault.MISSING_FILE)
    remove_pack(packed)
    assert not packed.exists()


HOLDER = """
import sys
from moet.pack.reader import open_pack
with open_pack(sys.argv[1]).hold():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_pack_that_a_process_holds_is_not_removed(packed: Path) -> None:
    """Two may hold it; the kernel gives back what a killed one held."""
    command = [sys.executable, "-c", HOLDER, str(packed)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    holders = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    try:
        for holder in holders:
            assert holder.stdout.readline() == "held\n"
        for holder in holders:
            assert is_used(packed)
            assert describe(packed).used
            refused(lambda: remove_pack(packed), PackFault.IN_USE)
            open_pack(packed)
            holder.kill()
            holder.wait()
        assert not is_used(packed)
        remove_pack(packed)
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def test_a_pack_that_was_removed_meanwhile_cannot_be_held(packed: Path) -> None:
    pack = open_pack(packed)
    remove_pack(packed)
    with pytest.raises(BrokenPack), pack.hold():
        pytest.fail("there is nothing to hold")


def test_a_pack_that_was_written_again_meanwhile_cannot_be_held(
    toy: Checkpoint, mine: Path, tmp_path: Path
) -> None:
    pack = open_pack(write_pack(toy, [tmp_path / "x"]).folder)
    other = write_pack(open_checkpoint(mine), [tmp_path / "y"]).folder
    (other / MANIFEST).rename(pack.folder / MANIFEST)
    with pytest.raises(BrokenPack) as caught, pack.hold():
        pytest.fail("it is another pack")
    assert caught.value.fault is PackFault.CHANGED


def test_a_lock_that_was_removed_while_we_waited_is_no_lock(packed: Path) -> None:
    remover = FolderLock(packed, shared=False)
    timer = threading.Timer(0.2, lambda: ((packed / LOCK).unlink(), remover.release()))
    timer.start()
    refused(lambda: FolderLock(packed, shared=True), PackFault.NO_PACK)
    timer.join()


def test_a_glance_does_not_disturb_who_wants_to_hold(packed: Path) -> None:
    glance = FolderLock(packed, shared=False)
    timer = threading.Timer(0.2, glance.release)
    timer.start()
    with open_pack(packed).hold():
        assert is_used(packed)
    timer.join()
    glance.release()  # the second time does nothing


def test_a_copy_without_a_lock_can_be_held(packed: Path) -> None:
    (packed / LOCK).unlink()
    assert not is_used(packed)
    with open_pack(packed).hold():
        assert is_used(packed)


def test_a_journal_alone_is_an_unfinished_pack(unfinished: Path) -> None:
    assert not (unfinished / MANIFEST).exists()
    (unfinished / JOURNAL).write_bytes(b"nonsense")
    entry = describe(unfinished)
    assert entry.state is State.DAMAGED
    assert "bad-journal" in entry.problem
