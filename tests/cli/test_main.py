"""Exit status, errors, pipes, start-up: what every command has in common."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import typer

from moet.cli import console
from moet.cli import main as cli
from moet.machine.versions import version_of

from .conftest import Moet

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "vllm", "transformers", "openai")
COMMANDS = ("serve", "chat", "doctor", "synth", "version", "bench cpu", "verify quality")

ERRORS = {
    "": "Usage: moet [OPTIONS] COMMAND [ARGS]...",
    "serv": "error: No such command 'serv'. Did you mean 'serve'?\nhint: moet --help\n",
    "--nope": "error: No such option: --nope\nhint: moet --help\n",
    "version extra": "error: Got unexpected extra argument(s) (extra)\nhint: moet version --help\n",
    "serve": "error: Missing argument 'MODEL'\nhint: moet serve --help\n",
    "serve --max-num-seqs 4 demo": "error: the model comes first\nhint: moet serve MODEL [flags]\n",
    "serve demo extra": "error: unexpected argument 'extra'\nhint: moet serve takes one model\n",
    "serve demo --model x": "error: --model cannot be given\n"
    "hint: the model is the first argument: moet serve MODEL\n",
    "serve demo --load-format auto": "error: --load-format cannot be given\n"
    "hint: moet loads the model: leave it out\n",
    "serve nosuch": "error: nosuch is not a folder here\n"
    "hint: give the folder of a downloaded checkpoint, or: moet serve demo\n",
    "serve org/model": "error: org/model is not a folder here\n"
    "hint: download it: hf download org/model --local-dir model, then: moet serve ./model\n",
    "serve demo --prot 9": "error: neither moet nor vLLM knows --prot\nhint: did you mean --port?",
    "synth qwen3-30b-a3b": "error: qwen3-30b-a3b has 17.21 GiB\nhint: name a FOLDER, or cut it: ",
    "serve demo --host 0.0.0.0": "error: --host 0.0.0.0 opens the server to others without an "
    "API key\nhint: set MOET_API_KEY (or --api-key), or leave --host out to serve this machine "
    "only\n",
    "chat hi --url http://127.0.0.1:9": "error: no server answers at http://127.0.0.1:9\n"
    "hint: start one: moet serve demo\n",
    "chat": 'error: there is nothing to ask\nhint: moet chat "How much is 12 + 30?"\n',
    "bench cpu --tokens x": "error: --tokens 'x' is not a list of numbers\nhint: --tokens 1,2,8\n",
    "bench cpu --tokens 1,,2": "error: --tokens '1,,2' has an empty entry\nhint: --tokens 1,2,8\n",
    "bench cpu --tokens 1,8,1": "error: --tokens names 1 twice\nhint: --tokens 1,2,8\n",
    "bench cpu --threads 1,": "error: --threads '1,' has an empty entry\nhint: --threads 1,2\n",
    "bench cpu --peers ,": "error: --peers ',' has an empty entry\nhint: --peers all, or none\n",
    "bench cpu --tokens 99999999999": "error: 99999999999 tokens; 65535 at most\nhint: a step",
    "bench cpu --hidden 48": "error: hidden size 48 has no whole blocks of 32\nhint: take a",
    "bench cpu --act int4": "error: --act 'int4' is not a format\nhint: int8, int16 or both\n",
    "synth": "error: a preset or a config.json is needed\n"
    "hint: moet synth --list prints the presets\n",
    "synth qwen3-30b-a3b --shard-size 0": "error: --shard-size 0 is too small\nhint: take 1.00 MiB",
    "synth qwen3-30b-a3b --shard-size 9e9": "error: '9e9' is not a size\nhint: write 8GiB",
    "synth qwen3-30b-a3b --layers -1": "error: --layers -1 is out of range\nhint: this model has",
    "serve demo --port 70000": "error: --port 70000 is not a port\nhint: take one of 1 to 65535",
    "verify bits --seed -1": "error: seed -1\nhint: 0 or more\n",
    "verify quality --each 0": "error: 0 questions a kind\nhint: ask 1 to 100000\n",
    "verify quality --each -1": "error: -1 questions a kind\nhint: ask 1 to 100000\n",
    "verify quality --kinds ,": "error: --kinds ',' has an empty entry\nhint: kinds are addition, ",
    "verify quality --kinds text,json,text": "error: --kinds names text twice\nhint: kinds are",
    "verify quality --kinds poems": "error: there is no kind 'poems'\nhint: kinds are addition, "
    "subtraction, multiplication, recall, json, text\n",
}


@pytest.mark.parametrize("line", ERRORS)
def test_errors_are_two_lines_on_stderr(moet: Moet, line: str) -> None:
    done = moet(*line.split())
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(ERRORS[line])
    assert "Traceback" not in done.stderr


def test_a_bad_value_is_named(moet: Moet) -> None:
    done = moet("serve", "demo", "--port", "x")
    assert done.returncode == 2
    assert done.stderr.startswith("error: Invalid value for '--port': ")
    assert done.stderr.endswith("hint: moet serve --help\n")


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [("MOET_THRAEDS", "2", "unknown setting"), ("MOET_THREADS", "two", "cannot be read")],
)
def test_bad_settings_are_errors_of_the_command(
    moet: Moet, name: str, value: str, named: str
) -> None:
    for command in (["serve", "demo"], ["version"], ["doctor"]):
        done = moet(*command, **{name: value})
        assert (done.returncode, done.stdout) == (2, "")
        assert named in done.stderr
        assert "hint: " in done.stderr


def test_an_absent_instruction_set_is_not_proven(moet: Moet) -> None:
    done = moet("verify", "bits", "--outputs", "1", MOET_ISA="neon")
    assert (done.returncode, done.stdout) == (2, "")
    assert "instruction set 'neon' is not available" in done.stderr


@pytest.mark.parametrize("command", ["version", "version --json", "synth --list"])
def test_a_full_disk_behind_stdout_is_an_error(command: str) -> None:
    code = "import sys; from moet.cli.main import main; sys.argv[0] = 'moet'; main()"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, *command.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: the system refuses: [Errno 28]")
    assert "Traceback" not in done.stderr


def test_what_nobody_foresaw_is_two_lines(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def broken(*_arguments: Any, **_options: Any) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(cli, "app", broken)
    assert cli.run(["version"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: a fault of moet: ZeroDivisionError: by zero\nhint: ")


def test_too_little_memory_is_not_a_fault(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def greedy(*_arguments: Any, **_options: Any) -> None:
        raise MemoryError("Unable to allocate 128. GiB")

    monkeypatch.setattr(cli, "app", greedy)
    assert cli.run(["synth"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: not enough memory: Unable to allocate 128. GiB\nhint: ask for less"
    )


def test_ctrl_c_is_said(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def stopped(*_arguments: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", stopped)
    assert cli.run(["synth"]) == 130
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "interrupted\n")


def test_debug_shows_the_traceback(moet: Moet) -> None:
    done = moet("--debug", "serve", "nosuch")
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "CheckpointError: nosuch is not a folder here" in done.stderr


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_goes_to_stdout_and_fits_a_terminal(moet: Moet, command: str) -> None:
    done = moet(*command.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: moet {command}".rstrip())
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b[" not in done.stdout


def test_version_is_data(moet: Moet) -> None:
    done = moet("version")
    assert moet("--version").stdout == done.stdout
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"moet {version_of('moet')} (python 3.")


@pytest.mark.parametrize("command", ["--help", "serve --help", "version", "doctor --json"])
def test_light_commands_import_nothing_heavy(command: str) -> None:
    code = (
        "import sys; from moet.cli.main import run; run(sys.argv[1:]);"
        f"bad = [name for name in {HEAVY} if name in sys.modules];"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_help_needs_not_even_numpy() -> None:
    code = "import sys, moet.cli.main as m; m.run(['--help']); sys.exit('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0


def test_a_clone_s_script_is_named_in_hints_and_usage(moet: Moet) -> None:
    name = {"MOET_PROGRAM": "./moet"}
    assert "or: ./moet serve demo\n" in moet("serve", "nosuch", **name).stderr
    assert "hint: ./moet serve --help\n" in moet("serve", **name).stderr
    assert moet("--help", **name).stdout.startswith("Usage: ./moet [OPTIONS]")


def test_calls_of_every_command_are_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOET_PROGRAM", "./moet")
    names = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    assert set(names) <= set(console.COMMANDS)
    kept = "moet serves; moet reads it too; ./moet doctor; /opt/moet serve"
    assert console.called(kept) == kept
    assert console.called("(moet chat)") == "(./moet chat)"


def test_a_terminal_gets_lines_folded_at_blanks() -> None:
    """A pseudo-terminal of 80 columns: no word is torn, and what follows ^C has its own line."""
    code = (
        "from moet.cli import console; from moet.base.errors import MoetError;"
        "console.show_error(MoetError('e', hint='word ' * 30)); console.leave_line();"
        "console.say('stopping')"
    )
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    variables = {**kept, "TERM": "dumb"}
    subprocess.run([sys.executable, "-c", code], stderr=theirs, env=variables, check=True)
    os.close(theirs)
    lines = os.read(ours, 4096).decode().replace("\r", "").splitlines()
    os.close(ours)
    assert max(map(len, lines)) <= 80
    assert set(" ".join(lines[1:-2]).split()) == {"hint:", "word"}
    assert lines[-2:] == ["", "stopping"]


def test_colour_where_it_is_asked_for(moet: Moet) -> None:
    assert "\x1b[1;31merror:" in moet("serve", "nosuch", FORCE_COLOR="1").stderr


def test_a_missing_native_part_is_an_error_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(*_: object, **__: object) -> None:
        raise ImportError("No module named 'moet._core'")

    monkeypatch.setattr(cli, "app", absent)
    assert cli.run([]) == 2
    assert "hint: moet doctor says what is missing" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m moet synth --list | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


def test_the_documents_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
