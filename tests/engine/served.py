"""``moet serve`` as a user runs it: a process of its own, with places of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from moet import demo
from moet.engine import preflight, runfiles
from moet.engine.heartbeat import Page
from moet.engine.runfiles import RunFiles
from moet.machine import processes
from moet.machine.processes import Process
from moet.testing.toy import write_toy_checkpoint

SHM = Path("/dev/shm")
START_SECONDS = 600  # a busy machine of two cores
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def model_folder(tmp_path: Path) -> Path:
    """The demo model; in a clone without its weights a random one with its tokenizer."""
    if (demo.path() / "config.json").exists():
        return demo.path()
    write_toy_checkpoint(tmp_path / "toy", vocab=1024)
    for name in TOKENIZER:
        shutil.copy(demo.path() / name, tmp_path / "toy" / name)
    return tmp_path / "toy"


@dataclass
class Places:
    """Directories that a test's servers use instead of the user's."""

    root: Path
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("run", "cache", "tmp"):
            (self.root / name).mkdir(mode=0o700, exist_ok=True)

    @property
    def environ(self) -> dict[str, str]:
        """The environment of every command of the test."""
        ours = {
            "XDG_RUNTIME_DIR": str(self.root / "run"),
            "MOET_CACHE_DIR": str(self.root / "cache"),
            "TMPDIR": str(self.root / "tmp"),
            "MOET_STALL_SECONDS": "6",
        }
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MOET_")}
        return {**kept, **ours, **self.variables}

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """One ``moet`` command, to its end."""
        command = [sys.executable, "-m", "moet", *arguments]
        return subprocess.run(
            command, env=self.environ, input=stdin, capture_output=True, text=True, check=False
        )

    def files(self) -> list[RunFiles]:
        """What ``runfiles.servers`` says in that environment."""
        base = self.root / "run" / "moet"
        found = [runfiles._read(path) for path in sorted(base.iterdir())] if base.is_dir() else []
        return [entry for entry in found if entry]

    def leftovers(self) -> list[str]:
        """Run files and temporary files that are still there."""
        return [str(p) for name in ("run", "tmp") for p in (self.root / name).rglob("*")]


@dataclass
class Served:
    """A ``moet serve`` that is ready."""

    places: Places
    process: subprocess.Popen[str]
    facts: dict[str, Any]
    health: list[int]
    errors: Path
    files: RunFiles
    family: list[Process]

    @property
    def url(self) -> str:
        """Where it answers."""
        return str(self.facts["url"])

    @property
    def worker(self) -> int:
        """The process that computes."""
        (rank,) = Page.open(self.files.page).ranks()
        return rank.pid

    def said(self) -> str:
        """stderr so far."""
        return self.errors.read_text()

    def end(self, seconds: float = 60) -> int:
        """Waits for the exit status."""
        return self.process.wait(seconds)

    def assert_nothing_left(self) -> None:
        """No process, no shared memory, no file."""
        deadline = time.monotonic() + 10
        while any(processes.is_alive(member) for member in self.family):
            assert time.monotonic() < deadline, "a process is left"
            time.sleep(0.1)
        assert self.places.leftovers() == []
        assert [n for n in self.files.record.shared_memory if (SHM / n).exists()] == []


def watch_health(url: str, seen: list[int], stop: threading.Event) -> None:
    """Notes every change of /health; 0 stands for no connection."""
    while not stop.wait(0.05):
        try:
            status = httpx.get(f"{url}/health", timeout=5).status_code
        except httpx.HTTPError:
            status = 0
        if seen[-1:] != [status]:
            seen.append(status)


@contextmanager
def serving(places: Places, folder: Path, *extra: str) -> Iterator[Served]:
    """Starts a server and waits for its JSON line; kills whatever the test leaves of it."""
    port = preflight.free_port()
    command = [sys.executable, "-m", "moet", "serve", str(folder), "--json", "--port", str(port)]
    errors = places.root / f"stderr-{port}"
    seen: list[int] = []
    stop = threading.Event()
    watcher = threading.Thread(
        target=watch_health, args=(f"http://127.0.0.1:{port}", seen, stop), daemon=True
    )
    with errors.open("w") as sink:
        process = subprocess.Popen(
            [*command, *extra], env=places.environ, stdout=subprocess.PIPE, stderr=sink, text=True
        )
    watcher.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, errors.read_text()
        (files,) = [f for f in places.files() if f.record.pid == process.pid]
        family = files.processes()
        yield Served(places, process, json.loads(line), seen, errors, files, family)
    finally:
        stop.set()
        watcher.join()
        process.kill()
        process.wait()
        process.stdout.close()
        for left in places.files():
            left.kill_processes()


def chat_body(text: str, **options: Any) -> dict[str, Any]:
    """A request for a greedy answer."""
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "temperature": 0, **options}


class InFlight(threading.Thread):
    """A request that would take long, in a thread; what its client sees."""

    def __init__(self, served: Served, *, stream: bool) -> None:
        super().__init__(daemon=True)
        model = served.facts["model"]
        self.body = chat_body("Go on and on.", max_tokens=3500, stream=stream, model=model)
        self.body["ignore_eos"] = True
        self.url = f"{served.url}/v1/chat/completions"
        self.stream = stream
        self.status = 0
        self.lines: list[str] = []
        self.broken = ""
        self.has_begun = threading.Event()
        self.start()

    def run(self) -> None:
        """The request."""
        try:
            with httpx.stream("POST", self.url, json=self.body, timeout=300) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    self.lines.append(line)
                    if line.startswith("data:"):
                        self.has_begun.set()
        except httpx.HTTPError as error:
            self.broken = f"{type(error).__name__}: {error}"

    def error(self, seconds: float) -> str:
        """The error message that the client got, within a time."""
        self.join(seconds)
        assert not self.is_alive(), "the client still waits"
        assert self.broken == ""
        events = [line.removeprefix("data: ") for line in self.lines if "error" in line]
        assert len(events) == 1, self.lines[-3:]
        return str(json.loads(events[0])["error"]["message"])


def wait_for(members: Sequence[Process], seconds: float) -> None:
    """Until all of them are gone."""
    deadline = time.monotonic() + seconds
    while left := [member for member in members if processes.is_alive(member)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def interrupt(process: subprocess.Popen[str]) -> None:
    """What ctrl-C in a terminal does to the command."""
    process.send_signal(signal.SIGINT)
