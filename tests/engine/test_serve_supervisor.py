"""The supervisor with a stand-in for the API server: starts, ends, failures, leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moet.base.errors import EngineError
from moet.engine import runfiles, serve
from moet.engine.serve import Server
from moet.machine import processes

from . import supervise
from .supervise import FAKE, plan, ready

SHM = Path("/dev/shm")


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run files and logs of a test are its own; another server on this machine is not seen."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("MOET_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(serve, "STOP_SECONDS", 1.0)


def made(tmp_path: Path) -> list[Path]:
    """The shared memory that stand-ins of this test have made."""
    notes = (tmp_path / "cache").glob("made-*")
    return [SHM / note.name.removeprefix("made-") for note in notes]


@pytest.fixture(autouse=True)
def no_shared_memory_is_left(own_places: None, tmp_path: Path) -> Iterator[None]:
    yield
    assert [path for path in made(tmp_path) if path.exists()] == []


def family(server: Server) -> list[processes.Process]:
    found = server.files.processes()
    assert len(found) >= 2
    return found


def assert_gone(server: Server, members: list[processes.Process]) -> None:
    assert not any(processes.is_alive(member) for member in members)
    assert not server.files.directory.exists()
    assert not Path(server.files.record.scratch).exists()


@pytest.mark.parametrize("deed", ["serve", "stubborn"])
def test_a_stopped_server_leaves_nothing(deed: str, tmp_path: Path) -> None:
    with ready(deed) as server:
        members = family(server)
        for _, _ in zip(range(3), server.serving(), strict=False):
            pass
        (segment,) = made(tmp_path)
        assert segment.name in server.files.record.shared_memory
        assert runfiles.running()[0].model == "fake"
    assert_gone(server, members)
    assert runfiles.running() == []
    assert "a line for the log" in Path(server.log or "").read_text()


def test_a_server_that_cannot_start_says_why() -> None:
    with (
        Server(plan("fail"), command=FAKE) as server,
        pytest.raises(EngineError, match="did not start: no room for the model") as error,
    ):
        list(server.starting())
    assert error.value.hint.startswith("buy memory (log: ")
    assert not server.files.directory.exists()


def test_a_server_that_ends_without_a_word_gives_its_exit_status() -> None:
    with (
        Server(plan("exit"), command=FAKE) as server,
        pytest.raises(EngineError, match="did not start: exit 7") as error,
    ):
        list(server.starting())
    assert str(server.log) in error.value.hint


def test_a_dead_engine_ends_the_server() -> None:
    with ready("die") as server:
        members = family(server)
        with pytest.raises(EngineError, match="has ended: the engine has died"):
            list(server.serving())
    assert_gone(server, members)


def test_an_api_server_that_was_killed_is_named() -> None:
    with ready("serve") as server:
        members = family(server)
        server._child.send_signal(signal.SIGKILL)
        with pytest.raises(EngineError, match="killed by SIGKILL"):
            list(server.serving())
    assert_gone(server, members)


def test_an_api_server_that_hangs_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOET_STALL_SECONDS", "0.5")
    with ready("hang") as server:
        members = family(server)
        began = time.monotonic()
        with pytest.raises(EngineError, match="has hung"):
            list(server.serving())
        assert time.monotonic() - began < 5
    assert_gone(server, members)


def test_an_api_server_that_hangs_before_its_first_token_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOET_STALL_SECONDS", "0.5")
    monkeypatch.setattr(serve, "PROBE_SECONDS", 0.7)
    with Server(plan("hang first"), command=FAKE) as server:
        with pytest.raises(EngineError, match="has hung for 1 s"):
            list(server.starting())
        members = family(server)
    assert_gone(server, members)


def test_an_end_without_room_for_notes_is_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_files: runfiles.RunFiles, **_changes: object) -> None:
        raise OSError(28, "No space left on device")

    with ready("serve") as server:
        members = family(server)
        monkeypatch.setattr(runfiles.RunFiles, "update", full)
    assert_gone(server, members)


def test_whatever_stops_the_polite_end_all_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_files: runfiles.RunFiles) -> None:
        raise RuntimeError("unforeseen")

    server = ready("serve")
    members = family(server)
    monkeypatch.setattr(runfiles.RunFiles, "note_shared_memory", broken)
    with pytest.raises(RuntimeError, match="unforeseen"):
        server.stop()
    assert_gone(server, members)


def test_a_page_that_cannot_be_made_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineError, match=r"heartbeat page .* cannot be made: .*No space left"):
        Server(plan("serve"), command=FAKE)
    assert list((tmp_path / "run").iterdir()) == []
    assert runfiles.left_over() == []


def test_a_stopped_process_can_be_ended() -> None:
    with ready("serve") as server:
        members = family(server)
        for member in members:
            os.kill(member.pid, signal.SIGSTOP)
        began = time.monotonic()
    assert time.monotonic() - began < 10
    assert_gone(server, members)


def test_what_a_killed_server_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    """The supervisor is another process here, killed with SIGKILL; its "engine" survives it."""
    command = [sys.executable, supervise.__file__, "orphans"]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    (left,) = runfiles.servers()
    assert left.is_live
    orphans = left.processes()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    (segment,) = made(tmp_path)
    assert segment.exists()
    with ready("serve") as server:
        assert server.swept.servers == 1
        assert server.swept.processes >= 1
        assert server.swept.segments == 1
    assert not any(processes.is_alive(orphan) for orphan in orphans)
    assert not left.directory.exists()
    assert not Path(left.record.scratch).exists()


def test_a_second_server_does_not_sweep_the_first() -> None:
    with ready("serve") as first, ready("serve") as second:
        assert second.swept.servers == 0
        assert {f.directory for f in runfiles.servers()} == {
            first.files.directory,
            second.files.directory,
        }
