"""What a server leaves outside its own memory, so that the next one can clean up after a kill -9.

Every server owns one directory, named after its supervisor (boot id, pid, start time) and numbered.
In it are the heartbeat page, the engine's sockets and ``server.json``. It lies in memory (the login
manager's runtime directory, else /dev/shm): a heartbeat must never wait for a disk. Every process
of the server carries the page's path in its environment; that is how orphans are known, whoever
their parent is now.

The supervisor holds a lock on a file in its directory for life: a server whose lock can be taken is
dead. That is true across containers that share the directory, where pids mean nothing. Nothing is
read, and nothing removed, that others than this user could have written.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import signal
import stat
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
LOCK = "lock"
HALF_MADE_SECONDS = 60.0  # a directory without a whole record, older than this, is left over
KILL_SECONDS = 30.0  # for the kernel to end processes that were killed
TRACKER = "multiprocessing.resource_tracker"  # unlinks shared memory when all others are gone
TRACKER_SECONDS = 10.0

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
        shared_memory: names under /dev/shm that its processes made, and their inodes.
    """

    pid: int
    started: int
    boot: str
    model: str = ""
    url: str = ""
    ready: bool = False
    scratch: str = ""
    shared_memory: dict[str, int] = field(default_factory=dict)


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
    """The directory of one server.

    Attributes:
        directory: where it is.
        record: what it says.
        lock: descriptor of the held lock; None in all processes but the supervisor.
        before: what was in /dev/shm before the server.
    """

    directory: Path
    record: Record = field(repr=False)
    lock: int | None = None
    before: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def is_live(self) -> bool:
        """Whether the supervisor still runs, in this container or in another one."""
        return _is_locked(self.directory)

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
        """Records what the server's processes have made in /dev/shm (its own page is elsewhere)."""
        names: set[str] = set()
        for process in self.processes():
            names |= processes.mapped_shared_memory(process.pid)
        found = {name: _own_segment(name) for name in sorted(names - self.before)}
        made = {name: inode for name, inode in found.items() if inode is not None}
        self.update(shared_memory=self.record.shared_memory | made)

    def processes(self) -> list[Process]:
        """The server's processes, the supervisor not among them."""
        found = processes.with_variable("MOET_HEARTBEAT", str(self.page))
        return [process for process in found if process.pid != os.getpid()]

    def strike(self, *, trackers: bool = False) -> int:
        """Kills what runs, once, and does not wait; returns how many that were.

        Resource trackers are spared unless told, and woken where somebody has stopped them: they
        unlink the shared memory of the others.
        """
        killed = 0
        for process in self.processes():
            spare = not trackers and TRACKER in processes.command_line(process.pid)
            sent = processes.kill(process, signal.SIGCONT if spare else signal.SIGKILL)
            killed += sent and not spare
        return killed

    def kill_processes(self) -> int:
        """Ends what still runs; returns how many were not on their way out.

        Raises:
            EngineError: the kernel does not let some of them end (they hang in a system call).
        """
        killed, began = 0, time.monotonic()
        seen: set[Process] = set()
        while left := self._not_ended(seen):
            seconds = time.monotonic() - began
            if seconds > KILL_SECONDS:
                pids = ", ".join(str(process.pid) for process in left)
                hint = "they hang in the kernel: look at the disk, else restart the machine"
                raise EngineError(f"processes {pids} were killed and do not end", hint=hint)
            killed += self.strike(trackers=seconds > TRACKER_SECONDS)
            time.sleep(0.05)
        return killed

    def _not_ended(self, seen: set[Process]) -> list[Process]:
        """Those of the server's processes that are still there; ``seen`` grows by them.

        A process that ends loses its environment first, and is found no more, long before its
        memory is free and its files are closed (a second or more for a large one).
        """
        seen.update(self.processes())
        return sorted(process for process in seen if processes.is_alive(process))

    def remove(self) -> int:
        """Removes the directory and what it names; returns how many shared segments were left."""
        left = sum(_unlink_segment(*entry) for entry in self._segments())
        scratch = Path(self.record.scratch)
        if scratch.name.startswith(f"moet-{self.directory.name}-") and _is_private(scratch):
            shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)
        _remove_if_empty(self.directory.parent)
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None
        return left

    def _segments(self) -> list[tuple[str, int]]:
        """What the record names in /dev/shm; nothing of it has survived a boot."""
        is_ours = self.record.boot == processes.boot_id()
        return list(self.record.shared_memory.items()) if is_ours else []


def _shared_memory() -> frozenset[str]:
    return frozenset(os.listdir(SHM)) if SHM.is_dir() else frozenset()


def _own_segment(name: str) -> int | None:
    """The inode of a file of this user right in /dev/shm; None for everything else."""
    if "/" in name or name in ("", ".", ".."):
        return None
    try:
        state = (SHM / name).lstat()
    except (OSError, ValueError):
        return None
    return state.st_ino if stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid() else None


def _unlink_segment(name: str, inode: int) -> bool:
    """Unlinks a segment if it is still the one that was recorded; whether it was."""
    if _own_segment(name) != inode:
        return False
    try:
        (SHM / name).unlink()
    except OSError as error:
        log.get("engine").warning("%s stays: %s", SHM / name, error)
        return False
    return True


def _is_private(path: Path) -> bool:
    """Whether a path is a directory of this user in which nobody else can write."""
    try:
        state = path.lstat()
    except (OSError, ValueError):
        return False
    is_own = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()
    return is_own and not state.st_mode & 0o022


def _require_private(path: Path) -> None:
    """Refuses what is there and is not private; a server that has just ended leaves nothing."""
    if os.path.lexists(path) and not _is_private(path):
        hint = "remove it, or set XDG_RUNTIME_DIR to a directory of your own"
        raise EngineError(f"{path} is not private to this user", hint=hint)


def _is_locked(directory: Path) -> bool:
    """Whether a supervisor holds the lock there. Those who ask do not hinder each other."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _take_lock(directory: Path) -> int:
    """Makes and locks the lock file of a new directory; the kernel frees it with the process."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(directory / LOCK, flags, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


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
    except OSError as error:
        raise EngineError(f"{path} cannot be made: {error}", hint="is the disk full?") from error
    _require_private(path)


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
    try:
        held = _take_lock(base / name)
        scratch = tempfile.mkdtemp(prefix=f"moet-{name}-")
        record = Record(
            pid=me.pid, started=me.started, boot=boot, model=model, url=url, scratch=scratch
        )
        files = RunFiles(base / name, record, held, _shared_memory())
        files.update()
    except OSError as error:
        shutil.rmtree(base / name, ignore_errors=True)
        what = f"the files of a server cannot be made: {error}"
        raise EngineError(what, hint="is the disk full?") from error
    return files


def _read(directory: Path) -> RunFiles | None:
    """The run files in a directory; None when they are not (or no longer, or not yet) whole."""
    try:
        raw = json.loads((directory / RECORD).read_text())
        segments = {str(name): int(inode) for name, inode in raw.pop("shared_memory").items()}
        return RunFiles(directory, Record(**raw, shared_memory=segments))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _directories() -> list[Path]:
    """The directories of this user's servers.

    Raises:
        EngineError: others can write there: what it says may be theirs.
    """
    base = base_directory()
    _require_private(base)
    try:
        entries = sorted(base.iterdir())
    except FileNotFoundError:
        return []
    found = [path for path in entries if path.is_dir() and not path.is_symlink()]
    for path in found:
        _require_private(path)
    return found


def servers() -> list[RunFiles]:
    """This user's servers, running or left over, oldest first.

    Raises:
        EngineError: their directory is not private to this user.
    """
    found = [files for path in _directories() if (files := _read(path))]
    return sorted(found, key=lambda files: files.record.started)


def running() -> list[Record]:
    """This user's servers that are ready for requests, the newest first.

    Raises:
        EngineError: their directory is not private to this user.
    """
    return [files.record for files in reversed(servers()) if files.record.ready and files.is_live]


def left_over() -> list[RunFiles]:
    """What killed servers have left.

    Raises:
        EngineError: their directory is not private to this user.
    """
    return [files for path in _directories() if (files := _dead(path))]


def _dead(directory: Path) -> RunFiles | None:
    """The run files of a dead server; also of one that died before its record was whole."""
    if _is_locked(directory):
        return None
    if (directory / LOCK).exists() and (files := _read(directory)) is not None:
        return files
    try:
        age = time.time() - directory.stat().st_mtime
    except OSError:
        return None
    boot, _, rest = directory.name.partition("-")
    owner = [int(word) for word in rest.split("-") if word.isdigit()]
    if age < HALF_MADE_SECONDS or len(owner) != 3:  # being made right now, or not made by us
        return None
    if boot == processes.boot_id()[:8] and processes.is_alive(Process(owner[0], owner[1])):
        return None
    return RunFiles(directory, Record(pid=owner[0], started=owner[1], boot=boot))


def sweep(candidates: Iterable[RunFiles] | None = None) -> Swept:
    """Removes what killed servers have left: orphaned processes, shared memory, files.

    Raises:
        EngineError: their directory is not private to this user, or a process does not end.
    """
    swept = Swept()
    for files in left_over() if candidates is None else candidates:
        if not files.is_live:
            killed = files.kill_processes()
            swept += Swept(1, killed, files.remove())
            log.get("engine").info("removed what was left of %s", files.directory)
    return swept
