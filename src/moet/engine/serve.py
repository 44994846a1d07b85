"""The supervisor of a server: starts it, watches it, ends it, and leaves nothing behind.

It is the process that the user started, small and without torch, so that signals, exit status and
cleaning up never depend on an engine's state. Below it: the API server (``apiserver``), under that
vLLM's engine core and workers. They are a session of their own (a ctrl-C in the terminal reaches
the supervisor alone), die with their parents, and carry the heartbeat page's path in their
environment, by which they are found.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from moet.base import env, log
from moet.base.errors import EngineError
from moet.engine import enginelog, runfiles
from moet.engine.heartbeat import Page, Phase
from moet.engine.serveplan import ServePlan
from moet.engine.watchdog import Watchdog

TURN_SECONDS = 0.1
PROBE_SECONDS = 300.0  # the least that the API server's loop may stand still before it is ready
STOP_SECONDS = 10.0  # for vLLM to end by itself
TELL_SECONDS = 0.5  # for requests in flight to be told that the server stops
READY_TIMEOUT = "7200"  # vLLM's own limit for loading, seconds; the user sees progress meanwhile
API_SERVER = (sys.executable, "-m", "moet.engine.apiserver")


@dataclass(frozen=True, kw_only=True)
class Status:
    """One look at a server. ``loaded`` and ``to_load`` are bytes of experts, over all workers."""

    phase: Phase
    loaded: int
    to_load: int
    alive: bool


def child_environ(plan: ServePlan, files: runfiles.RunFiles, *, verbose: bool) -> dict[str, str]:
    """The environment of the server's processes.

    No look at the network (the model is a folder), no usage reports, vLLM's temporary files in a
    directory that goes away with the server. SPT_NOENV keeps titles out of the environment.
    """
    cache = env.read().cache_dir.expanduser()
    ours = env.child_environ(
        MOET_HEARTBEAT=str(files.page),
        MOET_API_KEY=plan.api_key,
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_RPC_BASE_PATH=str(files.directory),
        TMPDIR=files.record.scratch,
        SPT_NOENV="1",
    )
    return env.with_defaults(
        ours,
        **plan.environ,
        TORCHINDUCTOR_CACHE_DIR=str(cache / "inductor"),
        VLLM_ENGINE_READY_TIMEOUT_S=READY_TIMEOUT,
        VLLM_LOGGING_LEVEL="INFO" if verbose else "WARNING",
        TOKENIZERS_PARALLELISM="false",
        PYTHONUNBUFFERED="1",
    )


class Server:
    """A running server. Use it in a ``with``; leaving the block ends it and cleans up.

    Args:
        plan: what to serve.
        verbose: whether vLLM's log goes to this process's stderr instead of a file.
        command: what starts the API server; the plan's arguments follow.
    """

    def __init__(
        self, plan: ServePlan, *, verbose: bool = False, command: tuple[str, ...] = API_SERVER
    ) -> None:
        self.plan = plan
        self.swept = runfiles.sweep()
        self.files = runfiles.create(model=plan.name, url=plan.url)
        quiet = () if verbose else ("--disable-uvicorn-access-log",)  # a log must not grow for ever
        self.log: Path | None = None
        try:
            self.page = Page.create(self.files.page)
            self._stall_seconds = env.read().stall_seconds
            self._child = self._start([*command, *plan.arguments, *quiet], verbose)
        except BaseException:
            self.files.remove()
            raise

    def _start(self, command: list[str], verbose: bool) -> subprocess.Popen[bytes]:
        output: IO[bytes] | int = sys.stderr.fileno() if verbose else subprocess.DEVNULL
        try:
            if not verbose:
                self.log, output = enginelog.create(self.files.log_name)
            return subprocess.Popen(
                command,
                env=child_environ(self.plan, self.files, verbose=verbose),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        finally:
            if not isinstance(output, int):
                output.close()

    @property
    def status(self) -> Status:
        """One look."""
        lines = [rank.loaded for rank in self.page.ranks()]
        return Status(
            phase=self.page.phase,
            loaded=sum(done for done, _ in lines),
            to_load=sum(total for _, total in lines),
            alive=self._child.poll() is None,
        )

    def starting(self) -> Iterator[Status]:
        """Looks until the first token is out. Raises EngineError when that does not happen."""
        watchdog = Watchdog(max(self._stall_seconds, PROBE_SECONDS))
        while True:
            status = self.status
            yield status
            if status.phase is Phase.READY and status.alive:
                break
            if status.phase is Phase.FAILED or not status.alive:
                raise self.why_not("the server did not start")
            self._watch_loop(watchdog, runs=status.phase is Phase.PROBING)
            time.sleep(TURN_SECONDS)
        self.files.note_shared_memory()
        self.files.update(ready=True)

    def serving(self) -> Iterator[Status]:
        """Looks for as long as all is well. Raises EngineError when it is not any more."""
        watchdog = Watchdog(self._stall_seconds)
        while True:
            status = self.status
            if status.phase is Phase.FAILED or not status.alive:
                self._wait(STOP_SECONDS)
                raise self.why_not("the server has ended")
            self._watch_loop(watchdog, runs=True)
            yield status
            time.sleep(TURN_SECONDS)

    def _watch_loop(self, watchdog: Watchdog, *, runs: bool) -> None:
        """Raises EngineError when the API server's event loop should run and does not."""
        if watchdog.observe(time.monotonic(), busy=runs, progress=self.page.loop_beats):
            seconds = watchdog.stood_still
            raise EngineError(f"the API server has hung for {seconds:.0f} s", hint=self._hint)

    @property
    def _hint(self) -> str:
        return f"its log says more: {self.log}" if self.log else "the log above says more"

    def why_not(self, what: str) -> EngineError:
        """The failure that the server left, or the little that can be said without one."""
        left = self.page.failure
        if left is not None:
            cause = enginelog.cause(self.log) if enginelog.is_vague(str(left)) else ""
            return EngineError(f"{what}: {cause or left}", hint=_with_log(left.hint, self.log))
        code = self._child.returncode
        how = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit {code}"
        return EngineError(f"{what}: {how}", hint=self._hint)

    def _wait(self, seconds: float) -> bool:
        """Whether the API server has ended within a time."""
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        """Ends the server: politely, then not. Bounded in time; nothing is left.

        Raises:
            EngineError: the kernel does not let a process end.
        """
        try:
            self._note()
            if self._child.poll() is None and self.page.phase is not Phase.FAILED:
                self._ask_to_end()
        finally:
            self.kill()

    def _note(self) -> None:
        """Records the shared memory that a resource tracker may have no time to unlink."""
        try:
            self.files.note_shared_memory()
        except OSError as error:  # no room, or the directory is gone: no reason not to end
            log.get("engine").warning("%s: %s", self.files.directory, error)

    def _ask_to_end(self) -> None:
        ready = self.page.phase is Phase.READY
        self.page.phase = Phase.STOPPING
        if ready:
            self._wait(TELL_SECONDS)
        self._child.terminate()
        self._wait(STOP_SECONDS)

    def strike(self) -> None:
        """Kills the server's processes and does not wait: for signal handlers. ``stop`` follows."""
        self.files.strike()

    def kill(self) -> None:
        """Ends all of the server's processes at once and removes its files.

        Raises:
            EngineError: the kernel does not let one end; the files stay for the next start.
        """
        self.files.kill_processes()
        self._child.kill()
        if not self._wait(runfiles.KILL_SECONDS):
            hint = "it hangs in the kernel: look at the disk, else restart the machine"
            raise EngineError(f"process {self._child.pid} was killed and does not end", hint=hint)
        self.files.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _with_log(hint: str, path: Path | None) -> str:
    return f"{hint} (log: {path})" if hint and path else hint or f"its log says more: {path}"
