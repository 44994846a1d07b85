"""``moet chat``: one question through pipes, and a conversation on a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moet.base.errors import EngineError
from moet.cli import chat
from moet.cli.client import Answer, Client

from .conftest import Moet
from .fake_openai import fake_openai, odd_server

Fake = tuple[str, list[dict[str, Any]]]


@pytest.fixture
def server() -> Iterator[Fake]:
    with fake_openai() as running:
        yield running


def test_the_answer_is_stdout_and_nothing_else(moet: Moet, server: Fake) -> None:
    url, requests = server
    done = moet("chat", "hello", "--url", url, "--system", "Be brief.", "--max-tokens", "9")
    assert (done.returncode, done.stdout, done.stderr) == (0, "12 + 30 = 42\n", "")
    (request,) = requests
    assert request["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
    ]
    assert (request["temperature"], request["max_tokens"], request["key"]) == (0.0, 9, "")


def test_the_question_may_come_from_a_pipe(moet: Moet, server: Fake) -> None:
    url, requests = server
    done = moet("chat", "--url", f"{url}/v1", stdin="hello\n", MOET_API_KEY="secret")
    assert done.stdout == "12 + 30 = 42\n"
    assert requests[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert requests[0]["key"] == "Bearer secret"


def test_json_has_the_figures(moet: Moet, server: Fake) -> None:
    done = moet("chat", "hello", "--url", server[0], "--json")
    answer = json.loads(done.stdout)
    assert (answer["model"], answer["answer"]) == ("fake", "12 + 30 = 42")
    assert (answer["prompt_tokens"], answer["tokens"]) == (7, 3)


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (
            "long",
            "error: the server answers 400: the context is too long\nhint: the server does not",
        ),
        ("key", "error: the server answers 401: a valid API key is needed\nhint: set MOET_API_KEY"),
        ("error", "error: the server answers 503: the engine has died\nhint: it starts, stops or"),
        ("cut", "error: the answer was cut off\nhint: "),
    ],
)
def test_what_goes_wrong_is_said(moet: Moet, server: Fake, question: str, said: str) -> None:
    done = moet("chat", question, "--url", server[0])
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


BAD_ARGUMENTS = {
    "--temperature nan hi": "--temperature nan is not a number from 0 up",
    "--temperature -1 hi": "--temperature -1.0 is not a number from 0 up",
    "--temperature inf hi": "--temperature inf is not a number from 0 up",
    "--max-tokens -1 hi": "--max-tokens -1 is negative",
    "--model demo hi": "--url and --model name two servers",
}


@pytest.mark.parametrize("line", BAD_ARGUMENTS)
def test_bad_arguments_are_named(moet: Moet, server: Fake, line: str) -> None:
    done = moet("chat", "--url", server[0], *line.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {BAD_ARGUMENTS[line]}\nhint: ")
    assert server[1] == []


def test_what_is_not_utf_8_is_named(server: Fake, tmp_path: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MOET_")}
    command = [sys.executable, "-m", "moet", "chat", "--url", server[0]]
    for extra, given, said in (
        ([], b"caf\xe9", b"error: stdin is not UTF-8: "),
        ([b"caf\xe9"], b"", b"error: the question is not UTF-8\n"),
        ([b"hello", b"--system", b"\xff"], b"", b"error: the question is not UTF-8\n"),
    ):
        done = subprocess.run(
            [*command, *extra], env=kept, input=given, capture_output=True, check=False
        )
        assert done.returncode == 2
        assert done.stderr.startswith(said)
        assert b"\nhint: " in done.stderr


def test_a_key_that_no_header_can_carry(moet: Moet, server: Fake) -> None:
    done = moet("chat", "hello", "--url", server[0], MOET_API_KEY="schl\u00fcssel")
    assert done.returncode == 2
    assert done.stderr.startswith("error: MOET_API_KEY has characters that an HTTP header cannot")
    assert "schl" not in done.stderr


def test_an_answer_that_stdout_cannot_spell(moet: Moet) -> None:
    body = [{"choices": [{"delta": {"content": "caf\u00e9 \ud83c"}}]}]
    events = "".join(f"data: {json.dumps(event)}\n\n" for event in body) + "data: [DONE]\n\n"
    with odd_server(b'{"data": [{"id": "odd"}]}', events.encode()) as url:
        done = moet("chat", "hi", "--url", url, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout, done.stderr) == (0, "caf? ?\n", "")


MODELS = b'{"data": [{"id": "odd"}]}'
ODD = {
    "no JSON": (b"<html>hello</html>", b""),
    "no models": (b'{"data": []}', b""),
    "another form": (b'[{"models": 1}]', b""),
    "a list": (b"[]", b""),
    "events that are no JSON": (MODELS, b"data: {\n\n"),
    "events that are lists": (MODELS, b"data: [1]\n\n"),
    "choices that are words": (MODELS, b'data: {"choices": ["a"]}\n\n'),
    "usage that is a word": (MODELS, b'data: {"usage": "much"}\n\n'),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_servers_are_named(moet: Moet, case: str) -> None:
    with odd_server(*ODD[case]) as url:
        done = moet("chat", "hi", "--url", url)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: {url} answers in a way that moet does not understand: " in done.stderr
    assert "hint: is it the URL of a server with OpenAI's API?" in done.stderr


@pytest.mark.parametrize("error", ['"broken"', '{"code": "x"}', "null", "[]"])
def test_odd_errors_are_still_errors(moet: Moet, error: str) -> None:
    with odd_server(MODELS, b'data: {"error": ' + error.encode() + b"}\n\n") as url:
        done = moet("chat", "hi", "--url", url)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the server answers 500: ")
    assert "hint: " in done.stderr


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:99999", "is not the URL of a server"),
        ("127.0.0.1:8000", "is not the URL of a server"),
        ("http://", "is not the URL of a server"),
        ("ftp://127.0.0.1", "is not the URL of a server"),
        ("http://a\udcffb", "is not the URL of a server"),
        ("http://[::1", "is not the URL of a server"),
        ("http://127.0.0.1:9", "no server answers at"),
    ],
)
def test_urls_that_lead_nowhere(moet: Moet, url: str, said: str) -> None:
    done = moet("chat", "hi", "--url", url)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert "\nhint: " in done.stderr


def test_tls_that_nobody_speaks(moet: Moet, server: Fake) -> None:
    done = moet("chat", "hi", "--url", server[0].replace("http:", "https:"))
    assert done.returncode == 2
    assert "error: no server with TLS answers at" in done.stderr


def test_the_client_measures(server: Fake) -> None:
    answer = Answer()
    client = Client(server[0])
    assert list(client.stream([{"role": "user", "content": "hello"}], answer)) == [
        "12",
        " + 30",
        " = 42",
    ]
    assert 0 < answer.first <= answer.last
    assert answer.rate > 0
    with pytest.raises(EngineError, match="no server answers"):
        Client("http://127.0.0.1:9")


ON_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # ctrl-C is for whoever has the terminal
from moet.cli.main import main
main()
"""


class Terminal:
    """``moet chat`` on a pseudo-terminal."""

    def __init__(self, url: str, folder: Path) -> None:
        self.screen, terminal = pty.openpty()
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MOET_")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_TERMINAL, "chat", "--url", url],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**kept, "TERM": "xterm", "XDG_RUNTIME_DIR": str(folder)},
            start_new_session=True,
            # Tests run in a shell's background inherit that ctrl-C is ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )
        os.close(terminal)
        self.seen = ""
        self._read_to = 0

    def wait_for(self, text: str) -> None:
        """Reads on until a text has come."""
        deadline = time.monotonic() + 60
        while (at := self.seen.find(text, self._read_to)) < 0:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.screen], [], [], 0.2)[0]:
                self.seen += os.read(self.screen, 65536).decode()
        self._read_to = at + len(text)

    def type(self, text: str) -> None:
        """Keys."""
        os.write(self.screen, text.encode())

    def end(self) -> int:
        """Exit status."""
        status = self.process.wait(30)
        os.close(self.screen)
        return status


@pytest.fixture
def terminal(server: Fake, tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(server[0], tmp_path)
    yield opened
    opened.process.kill()
    opened.process.wait()


def test_a_conversation(terminal: Terminal, server: Fake) -> None:
    terminal.wait_for("> ")
    assert "fake at http://" in terminal.seen
    terminal.type("hello\n")
    terminal.wait_for("3 tokens")
    assert "12 + 30 = 42" in terminal.seen
    terminal.type("hello\n")
    terminal.wait_for("3 tokens")
    assert [m["role"] for m in server[1][1]["messages"]] == ["user", "assistant", "user"]
    terminal.type("/new\n")
    terminal.wait_for("a new conversation")
    terminal.type("long\n")
    terminal.wait_for("the context is too long")
    terminal.type("hello\n")
    terminal.wait_for("3 tokens")
    assert [m["content"] for m in server[1][-1]["messages"]] == ["hello"]
    terminal.type("/quit\n")
    assert terminal.end() == 0


def test_a_line_that_is_not_utf_8_does_not_end_a_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def odd(_prompt: str) -> str:
        return b"caf\xe9".decode()

    monkeypatch.setattr("builtins.input", odd)
    assert chat.read_line() == ""
    assert capsys.readouterr().err == "that line is not UTF-8\n"


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.type("slow\n")
    terminal.wait_for("....")
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("3 tokens")
    terminal.wait_for("> ")  # a prompt drops what was typed before it
    terminal.type("\x04")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.seen


def test_of_two_servers_the_newest_is_taken_and_named(
    server: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [SimpleNamespace(model="newer", url=server[0]), SimpleNamespace(model="old", url="")]
    monkeypatch.setattr("moet.engine.runfiles.running", lambda: found)
    with chat.connected("", "") as client:
        assert client.url == server[0]
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("2 servers run; taking the newest, newer at http://127.0.0.1:")
