"""``moet pack``: what it prints, where, and with which exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moet.checkpoint import open_checkpoint
from moet.cli import main as cli
from moet.pack import blockfile
from moet.pack.check import check_pack
from moet.pack.reader import open_pack
from moet.testing.toy import write_toy_checkpoint

from .conftest import Moet


@dataclass
class Done:
    """What a command that ran in this process has left."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``moet`` here: a process takes a second to start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOET_CACHE_DIR", str(tmp_path / "cache"))

    def here(*arguments: str) -> Done:
        status = cli.run(list(arguments))
        told = capsys.readouterr()
        return Done(status, told.out, told.err)

    return here


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_toy_checkpoint(tmp_path / "model", experts=4)
    return tmp_path / "model"


def test_a_model_is_packed_checked_listed_and_removed(
    moet: Moet, model: Path, tmp_path: Path
) -> None:
    done = moet("pack", "model")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.parent == tmp_path / "cache" / "packs"
    assert "8 records" in done.stderr
    assert check_pack(open_pack(folder, open_checkpoint(model)), open_checkpoint(model)).passed

    again = moet("pack", "model")
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert "there already" in again.stderr

    checked = moet("pack", "--check", "--against", "model")
    assert checked.returncode == 0
    assert "8 records with their checksums and the checkpoint" in checked.stdout

    (entry,) = json.loads(moet("pack", "list", "--json").stdout)
    assert (entry["folder"], entry["state"], entry["used"]) == (str(folder), "complete", False)
    shown = moet("pack", "list").stdout
    assert folder.name in shown
    assert "complete" in shown

    removed = moet("pack", "rm", folder.name, "--json")
    assert json.loads(removed.stdout) == [{"folder": str(folder), "bytes": entry["bytes"]}]
    assert not folder.exists()
    empty = moet("pack", "list")
    assert (empty.returncode, empty.stdout) == (0, "")
    assert "no packs" in empty.stderr


def test_json_of_writing_and_several_disks(run: Run, model: Path, tmp_path: Path) -> None:
    done = run("pack", "model", "--out", "a", "--out", "b", "--threads", "2", "--full", "--json")
    facts = json.loads(done.stdout)
    pack = open_pack(Path(facts["folder"]), open_checkpoint(model))
    assert [file.parent.parent for file in pack.files] == [tmp_path / "a", tmp_path / "b"]
    assert (facts["records"], facts["kept"], facts["bytes"]) == (8, 0, pack.nbytes)
    assert facts["threads"] == 2
    assert facts["bytes_per_s"] > 0
    assert pack.plan.checkpoint[0].content is not None
    checked = run("pack", "--check", facts["folder"], "--json")
    assert json.loads(checked.stdout)["passed"] is True


def test_a_bad_record_is_exit_status_1(run: Run, model: Path) -> None:
    folder = Path(run("pack", "model").stdout.strip())
    with (folder / "experts-0.bin").open("r+b") as stream:
        stream.write(b"\xff\xfe\xfd")
    for flags in ((), ("--json",)):
        done = run("pack", "--check", str(folder), *flags)
        assert done.returncode == 1
        assert done.stderr == ""
    assert json.loads(done.stdout)["bad"][0]["expert"] == 0
    told = run("pack", "--check", str(folder)).stdout
    assert "layer 0 expert 0" in told
    assert "checksum" in told


def test_what_cannot_be_done_is_exit_status_2(run: Run, model: Path, tmp_path: Path) -> None:
    folder = Path(run("pack", "model").stdout.strip())
    os.utime(model / "model.safetensors", ns=(1, 1))
    wrong = {
        ("--check", "model"): "stale",
        ("--check", "nothing.moetpack"): "no-pack",
        ("nothing",): "not a folder",
        ("model", "--against"): "--check",
        ("model", "--threads", "-1"): "threads",
        ("model", "--out", "model/config.json"): "write-failed",
        ("rm", "nothing"): "no-pack",
        ("rm", "model"): "no-pack",
        ("--nonsense",): "--nonsense",
        ("rm",): "PACK",
    }
    for arguments, said in wrong.items():
        done = run("pack", *arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert said in done.stderr, arguments
        assert "hint: " in done.stderr, arguments
    stale = run("pack", "list", "--json")
    assert json.loads(stale.stdout)[0]["state"] == "stale"
    newer = run("pack", "model")
    assert newer.returncode == 0
    assert f"moet pack rm {folder}" in newer.stderr


def test_a_pack_in_use_is_not_removed(run: Run, model: Path) -> None:
    folder = Path(run("pack", "model").stdout.strip())
    with open_pack(folder).hold():
        done = run("pack", "rm", str(folder))
        assert done.returncode == 2
        assert "in-use" in done.stderr
        assert json.loads(run("pack", "list", "--json").stdout)[0]["used"] is True
        assert " yes " in run("pack", "list").stdout
    assert run("pack", "rm", str(folder)).returncode == 0


def test_no_subcommand_shows_the_help(run: Run) -> None:
    for arguments in ((), ("--help",), ("-h",)):
        done = run("pack", *arguments)
        told = done.stdout + done.stderr
        assert "list" in told
        assert "write" in told
    assert "--against" in run("pack", "write", "--help").stdout


def test_ctrl_c_says_that_it_can_go_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pwrite, written = os.pwrite, []

    def interrupting(*arguments: Any) -> int:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(1)
        return pwrite(*arguments)

    command = ["pack", str(model), "--out", str(tmp_path / "x"), "--threads", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(blockfile.os, "pwrite", interrupting)
        assert cli.run(command) == 130
    told = capsys.readouterr()
    assert told.out == ""
    assert "the same command goes on from there" in told.err
    assert cli.run(["pack", "list", "--out", str(tmp_path / "x")]) == 0
    assert "unfinished 3 of 8" in capsys.readouterr().out
    assert cli.run(command) == 0
    assert "3 of them were there" in capsys.readouterr().err


SLOW = """
import os, sys, time
from moet.cli import main
from moet.pack import blockfile
pwrite = os.pwrite
def slow(*arguments):
    time.sleep(0.3)
    return pwrite(*arguments)
blockfile.os.pwrite = slow
sys.argv[0] = "moet"
main.main()
"""


def test_a_real_ctrl_c(model: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "x")
    command = [sys.executable, "-c", SLOW, "pack", str(model), "--out", out, "--threads", "1"]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore ctrl-C, and so would the child of one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    deadline = time.monotonic() + 60
    while not list(Path(out).glob("*/experts-0.bin")) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.4)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "goes on from there" in told
    assert cli.run(["pack", str(model), "--out", out]) == 0
    (folder,) = Path(out).iterdir()
    assert check_pack(open_pack(folder), open_checkpoint(model)).passed
