"""What a server leaves outside its own memory, so that the next one can clean up after a kill -9.

Every server owns one directory, named after its supervisor (boot id, pid, start time) and numbered.
In it are the heartbeat page, the engine's sockets and ``server.json``. It lies in memory (the login
manager's runtime directory, else /dev/shm): a heartbeat must never wait for a disk. Every process
of the server carries the page's path in its environment; that is how orphans are known, whoever
their parent is now.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from moet.base import env, log
from moet.base.errors import EngineError
from moet.machine import processes
from moet.machine.processes import Process

SHM = Path("/dev/shm")
RECORD = "server.json"
TRACKER = "multiprocessing.resource_tracker"  # unlinks shared memory when all others are gone
TRACKER_SECONDS = 3.0

_numbers = itertools.count()  # of the servers that this process has started


@dataclass(frozen=True, kw_only=True)
class Record:
    """``server.json``: what another process may want to know about a server.

    Attributes:
        pid, started, boot: the supervisor's name.
        model: the name that the model is served under.
        url: where it answers.
        ready: whether it has answered a first request.
        scratch: its directory for temporary files.
        shared_memory: names under /dev/shm that its processes made.
    """

    pid: int
    started: int
    boot: str
    model: str = ""
    url: str = ""
    ready: bool = False
    scratch: str = ""
    shared_memory: tuple[str, ...] = ()

    @property
    def supervisor(self) -> Process:
        """The process that owns the directory."""
        return Process(self.pid, self.started)

    @property
    def is_live(self) -> bool:
        """Whether that process still runs."""
        return self.boot == processes.boot_id() and processes.is_alive(self.supervisor)


@dataclass(frozen=True)
class Swept:
    """What was left of servers that were killed, and is gone now."""

    servers: int = 0
    processes: int = 0
    segments: int = 0

    def __add__(self, other: Swept) -> Swept:
        return Swept(*(getattr(self, f) + getattr(other, f) for f in asdict(self)))


@dataclass
class RunFiles:
    """The directory of one server."""

    directory: Path
    record: Record = field(repr=False)

    @property
    def page(self) -> Path:
        """Where the heartbeat page is."""
        return self.directory / "beat"

    @property
    def log_name(self) -> str:
        """A file name for this server's log."""
        return f"serve-{self.directory.name}.log"

    def update(self, **changes: Any) -> None:
        """Rewrites ``server.json``; readers see the old one or the new one, whole."""
        self.record = replace(self.record, **changes)
        fresh = self.directory / f"{RECORD}.new"
        fresh.write_text(json.dumps(asdict(self.record)))
        fresh.rename(self.directory / RECORD)

    def note_shared_memory(self) -> None:
        """Records what the server's processes have in /dev/shm (its own page is not counted)."""
        names = set(self.record.shared_memory)
        for process in self.processes():
            names |= processes.mapped_shared_memory(process.pid)
        own = {name for name in names if (SHM / name).is_relative_to(self.directory.parent)}
        self.update(shared_memory=tuple(sorted(names - own)))

    def processes(self) -> list[Process]:
        """The server's processes, the supervisor not among them."""
        found = processes.with_variable("MOET_HEARTBEAT", str(self.page))
        return [process for process in found if process.pid != os.getpid()]

    def kill_processes(self) -> int:
        """Ends what still runs; returns how many were not on their way out.

        Resource trackers get the time to unlink the shared memory of the others.
        """
        killed, deadline = 0, time.monotonic() + TRACKER_SECONDS
        while left := self.processes():
            late = time.monotonic() > deadline
            for process in left:
                if late or TRACKER not in processes.command_line(process.pid):
                    killed += processes.kill(process, signal.SIGKILL)
            time.sleep(0.05)
        return killed

    def remove(self) -> int:
        """Removes the directory and what it names; returns how many shared segments were left."""
        left = [name for name in self.record.shared_memory if (SHM / name).exists()]
        for name in left:
            (SHM / name).unlink(missing_ok=True)
        if self.record.scratch:
            shutil.rmtree(self.record.scratch, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)
        _remove_if_empty(self.directory.parent)
        return len(left)


def _remove_if_empty(directory: Path) -> None:
    try:
        directory.rmdir()
    except OSError:
        return


def base_directory() -> Path:
    """The directory that holds the directories of this user's servers."""
    if (runtime := env.runtime_dir()) is not None:
        return runtime / "moet"
    if os.access(SHM, os.W_OK):
        return SHM / f"moet-{os.getuid()}"
    return env.read().cache_dir.expanduser() / "run"


def _private_directory(path: Path) -> None:
    """Makes a directory that only this user can enter; one that somebody else made is refused."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = path.stat(follow_symlinks=False)
    except OSError as error:
        raise EngineError(f"{path} cannot be made: {error}", hint="is the disk full?") from error
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        hint = "remove it, or set XDG_RUNTIME_DIR to a directory of your own"
        raise EngineError(f"{path} is not private to this user", hint=hint)


def create(*, model: str, url: str) -> RunFiles:
    """The directory of a server whose supervisor is this process.

    Raises:
        EngineError: no place for it, or the place is not private to this user.
    """
    me = processes.identify(os.getpid())
    assert me is not None
    boot = processes.boot_id()
    base = base_directory()
    name = f"{boot[:8]}-{me.pid}-{me.started}-{next(_numbers)}"
    _private_directory(base)
    _private_directory(base / name)
    scratch = tempfile.mkdtemp(prefix=f"moet-{name}-")
    record = Record(
        pid=me.pid, started=me.started, boot=boot, model=model, url=url, scratch=scratch
    )
    files = RunFiles(base / name, record)
    files.update()
    return files


def _read(directory: Path) -> RunFiles | None:
    """The run files in a directory; None when they are not (or no longer, or not yet) whole."""
    try:
        raw = json.loads((directory / RECORD).read_text())
        raw["shared_memory"] = tuple(raw["shared_memory"])
        return RunFiles(directory, Record(**raw))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def servers() -> list[RunFiles]:
    """This user's servers, running or left over, oldest first."""
    base = base_directory()
    found = [_read(path) for path in sorted(base.iterdir())] if base.is_dir() else []
    return sorted((f for f in found if f), key=lambda f: f.record.started)


def running() -> list[Record]:
    """This user's servers that are ready for requests, the newest first."""
    return [f.record for f in reversed(servers()) if f.record.ready and f.record.is_live]


def sweep(candidates: Iterable[RunFiles] | None = None) -> Swept:
    """Removes what killed servers have left: orphaned processes, shared memory, files."""
    swept = Swept()
    for files in servers() if candidates is None else candidates:
        if not files.record.is_live:
            killed = files.kill_processes()
            swept += Swept(1, killed, files.remove())
            log.get("engine").info("removed what was left of %s", files.directory)
    return swept
