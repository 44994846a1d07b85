"""What a server trusts of the files that others may have left: nothing that they could write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from moet.base.errors import EngineError
from moet.engine import runfiles
from moet.engine.runfiles import Record, RunFiles
from moet.machine import processes

BOOT = processes.boot_id()
GONE = 2**22 + 1  # more than any pid


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory for run files, as private as it has to be."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    base = tmp_path / "moet"
    base.mkdir(mode=0o700)
    return base


@pytest.fixture
def segment() -> Iterator[Path]:
    path = runfiles.SHM / f"moet-test-{os.getpid()}"
    path.write_text("x")
    yield path
    path.unlink(missing_ok=True)


def leave(base: Path, *, locked: bool = True, **record: object) -> Path:
    """The directory of a server that was killed."""
    folder = base / f"{BOOT[:8]}-{GONE}-7-0"
    folder.mkdir(mode=0o700)
    whole = {**asdict(Record(pid=GONE, started=7, boot=BOOT)), **record}
    (folder / runfiles.RECORD).write_text(json.dumps(whole))
    if locked:
        (folder / runfiles.LOCK).touch()
    return folder


def age(folder: Path) -> None:
    old = folder.stat().st_mtime - 2 * runfiles.HALF_MADE_SECONDS
    os.utime(folder, (old, old))


def refused() -> None:
    for look in (runfiles.servers, runfiles.running, runfiles.left_over, runfiles.sweep):
        with pytest.raises(EngineError, match="is not private to this user") as error:
            look()
        assert "XDG_RUNTIME_DIR" in error.value.hint


def test_a_base_that_others_can_write_is_refused(base: Path) -> None:
    folder = leave(base, ready=True)
    base.chmod(0o777)
    refused()
    assert folder.exists()


def test_a_directory_that_others_can_write_is_refused(base: Path) -> None:
    folder = leave(base)
    folder.chmod(0o770)
    refused()
    assert folder.exists()


def test_a_base_of_somebody_else_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(base)
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    refused()


def test_a_link_is_not_followed(base: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    base.rename(elsewhere)
    leave(elsewhere)
    base.symlink_to(elsewhere)
    refused()


def test_names_that_lead_elsewhere_are_left_alone(base: Path, tmp_path: Path) -> None:
    victim, scratch = tmp_path / "victim", tmp_path / "work"
    victim.write_text("mine")
    scratch.mkdir()
    inode = victim.stat().st_ino
    up = os.path.relpath(victim, runfiles.SHM)
    names = {str(victim): inode, up: inode, "..": 1, "": 1, "a\0b": 1}
    folder = leave(base, scratch=str(scratch), shared_memory=names)
    assert runfiles.sweep() == runfiles.Swept(1, 0, 0)
    assert victim.read_text() == "mine"
    assert scratch.exists()
    assert not folder.exists()


def test_a_scratch_directory_behind_a_link_is_left_alone(base: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    link = tmp_path / f"moet-{BOOT[:8]}-{GONE}-7-0-x"
    link.symlink_to(target)
    leave(base, scratch=str(link))
    runfiles.sweep()
    assert target.exists()


def test_what_is_named_rightly_goes(base: Path, tmp_path: Path, segment: Path) -> None:
    scratch = tmp_path / f"moet-{BOOT[:8]}-{GONE}-7-0-x"
    scratch.mkdir(mode=0o700)
    leave(base, scratch=str(scratch), shared_memory={segment.name: segment.stat().st_ino})
    assert runfiles.sweep() == runfiles.Swept(1, 0, 1)
    assert not scratch.exists()
    assert not segment.exists()


@pytest.mark.parametrize("other", ["inode", "boot"])
def test_a_segment_that_is_another_one_now_stays(base: Path, segment: Path, other: str) -> None:
    inode = segment.stat().st_ino + (other == "inode")
    boot = "another" if other == "boot" else BOOT
    leave(base, boot=boot, shared_memory={segment.name: inode})
    assert runfiles.sweep().segments == 0
    assert segment.exists()


def test_a_segment_that_cannot_be_unlinked_does_not_end_the_sweep(
    base: Path, segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = leave(base, shared_memory={segment.name: segment.stat().st_ino})

    def deny(_path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "no")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", deny)
        assert runfiles.sweep() == runfiles.Swept(1, 0, 0)
    assert not folder.exists()


# --- alive or dead


def test_a_lock_that_is_held_is_alive_whatever_the_pid(base: Path) -> None:
    """As a server in another container is seen: the pid means nothing here, the lock does."""
    folder = leave(base, ready=True, url="http://there")
    holder = f"import fcntl, sys\nf = open({str(folder / 'lock')!r})\n"
    holder += "fcntl.flock(f, fcntl.LOCK_EX)\nprint('held', flush=True)\nsys.stdin.read()"
    command = [sys.executable, "-c", holder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        age(folder)
        assert [record.url for record in runfiles.running()] == ["http://there"]
        assert runfiles.sweep() == runfiles.Swept()
        assert folder.exists()
        other.communicate()
    assert runfiles.running() == []
    assert runfiles.sweep().servers == 1


def test_own_files_are_alive_until_they_are_removed(base: Path) -> None:
    files = runfiles.create(model="m", url="u")
    assert files.is_live
    files.update(ready=True)
    assert [record.model for record in runfiles.running()] == ["m"]
    assert runfiles.sweep() == runfiles.Swept()
    files.remove()
    assert not files.is_live
    assert not base.exists()


def test_half_made_directories_go_once_they_are_old(base: Path) -> None:
    folder = leave(base, locked=False)
    (folder / runfiles.RECORD).unlink()
    strange = base / "notes"
    strange.mkdir(mode=0o700)
    assert runfiles.sweep() == runfiles.Swept()
    age(folder)
    age(strange)
    assert runfiles.sweep().servers == 1
    assert not folder.exists()
    assert strange.exists()


def test_only_what_the_server_made_is_recorded(
    segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = segment.with_name(segment.name + "-made")
    files = runfiles.create(model="m", url="u")
    made.write_text("y")
    one = processes.Process(1, 1)
    monkeypatch.setattr(RunFiles, "processes", lambda _: [one])
    names = {segment.name, made.name, "moet-0/name/beat", "not-there"}
    monkeypatch.setattr(processes, "mapped_shared_memory", lambda _pid: names)
    files.note_shared_memory()
    assert files.record.shared_memory == {made.name: made.stat().st_ino}
    monkeypatch.setattr(RunFiles, "processes", lambda _: [])
    assert files.remove() == 1
    assert not made.exists()


def test_killing_is_bounded(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RunFiles(base / "x", replace(Record(pid=1, started=1, boot=BOOT)))
    stuck = [processes.Process(GONE, 5)]
    monkeypatch.setattr(RunFiles, "processes", lambda _: stuck)
    monkeypatch.setattr(processes, "is_alive", lambda _: True)
    monkeypatch.setattr(runfiles, "KILL_SECONDS", 0.1)
    with pytest.raises(EngineError, match=f"processes {GONE} were killed and do not end"):
        files.kill_processes()


def test_a_process_that_gives_its_memory_back_has_not_ended(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its environment, by which it is known, is empty then."""
    files = RunFiles(base / "x", replace(Record(pid=1, started=1, boot=BOOT)))
    found = [[processes.Process(GONE, 5)]]
    looks = [True, True, True, False]
    monkeypatch.setattr(RunFiles, "processes", lambda _: found.pop() if found else [])
    monkeypatch.setattr(processes, "is_alive", lambda _: looks.pop(0))
    files.kill_processes()
    assert looks == []
