"""Signals to commands that own a server; the server is a stand-in, everything else is real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moet.machine import processes

ENGINE_TESTS = Path(__file__).parents[1] / "engine"

COMMON = f"""
import functools, sys, time
sys.path.insert(0, {str(ENGINE_TESTS)!r})
import supervise
from moet.cli import chat, main
from moet.cli import serve as command
from moet.engine import serve, serveplan
serve.Server = functools.partial(serve.Server, command=supervise.FAKE)
serveplan.make = lambda *_: supervise.plan(sys.argv[1])
"""
# What `moet chat` and `moet verify quality` do while an answer comes.
CHAT = """
with chat.own_server("demo"):
    print("up", flush=True)
    time.sleep(60)
"""
SERVE = """
command._show = lambda *_, **__: print("up", flush=True)
sys.exit(command.run(supervise.plan(sys.argv[1]), verbose=False, json=False))
"""


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "tmp").mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MOET_")}
    return {
        **kept,
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
        "MOET_CACHE_DIR": str(tmp_path / "cache"),
        "TMPDIR": str(tmp_path / "tmp"),
    }


def signalled(
    program: str, deed: str, places: dict[str, str], *numbers: int
) -> tuple[int, str, list[processes.Process]]:
    """Exit status, stderr and what is still alive of a program that gets signals once it is up."""
    with subprocess.Popen(
        [sys.executable, "-c", COMMON + program, deed],
        env=places,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n", process.communicate()
        (beat,) = Path(places["XDG_RUNTIME_DIR"]).rglob("beat")
        members = processes.with_variable("MOET_HEARTBEAT", str(beat))
        assert len(members) >= 2
        for number in numbers:
            process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    left = [str(p) for name in ("XDG_RUNTIME_DIR", "TMPDIR") for p in Path(places[name]).iterdir()]
    assert left == []
    return process.returncode, errors, [m for m in members if processes.is_alive(m)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_with_its_own_server_ends_with_it(places: dict[str, str], number: int) -> None:
    status, errors, alive = signalled(CHAT, "serve", places, number)
    assert (status, alive) == (128 + number, [])
    assert "Traceback" not in errors


def test_ctrl_c_is_python_s_while_a_command_works(places: dict[str, str]) -> None:
    _, errors, alive = signalled(CHAT, "serve", places, signal.SIGINT)
    assert "KeyboardInterrupt" in errors
    assert alive == []


def test_one_signal_ends_a_server(places: dict[str, str]) -> None:
    status, errors, alive = signalled(SERVE, "serve", places, signal.SIGTERM)
    assert (status, alive) == (0, [])
    assert "stopping" in errors


def test_two_at_once_are_no_error(places: dict[str, str]) -> None:
    status, errors, alive = signalled(SERVE, "stubborn", places, signal.SIGINT, signal.SIGTERM)
    assert (status, alive) == (130, [])
    assert "error" not in errors
    assert "Traceback" not in errors
