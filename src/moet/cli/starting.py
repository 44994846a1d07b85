"""What a person sees while a server starts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from moet.base.units import format_bytes, format_rate, format_seconds
from moet.cli import console
from moet.cli.stopping import Stopper
from moet.engine.heartbeat import Phase
from moet.engine.serve import Server, Status


class Loading:
    """Rate and time left of a load, from looks at how far it is."""

    def __init__(self) -> None:
        self._began: float | None = None

    def describe(self, status: Status, now: float) -> str:
        """``loading experts  1.2 of 4.0 GiB  2.1 GB/s  1.3 s left``."""
        if self._began is None:
            self._began = now
        seconds = now - self._began
        text = f"loading experts  {format_bytes(status.loaded)} of {format_bytes(status.to_load)}"
        if seconds > 0 and status.loaded:
            rate = status.loaded / seconds
            left = (status.to_load - status.loaded) / rate
            text += f"  {format_rate(rate)}  {format_seconds(left)} left"
        return text


def describe(status: Status, loading: Loading, now: float) -> str:
    """One line for where a start is."""
    if status.phase in (Phase.PROBING, Phase.READY):
        return "waiting for the first token"
    if status.to_load and status.loaded < status.to_load:
        return loading.describe(status, now)
    if status.to_load:
        return "experts loaded, warming up"
    return "starting vLLM" if status.phase is Phase.STARTING else "starting the engine core"


@contextmanager
def _progress(stream: Console) -> Iterator[tuple[Progress, TaskID]]:
    columns = (
        SpinnerColumn(finished_text=" "),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stream, transient=True) as progress:
        yield progress, progress.add_task("starting vLLM", total=None)


def wait_until_ready(server: Server, stopper: Stopper) -> float:
    """Shows progress until the first token; returns the seconds it took.

    On a terminal one line that changes; else a line whenever the stage changes.

    Raises:
        EngineError: the server did not start.
    """
    began, loading, stream = time.monotonic(), Loading(), console.err()
    if not stream.is_terminal:
        _wait_quietly(server, stopper)
    else:
        with _progress(stream) as (progress, task):
            for status in server.starting():
                if stopper.asked:
                    break
                progress.update(
                    task,
                    description=describe(status, loading, time.monotonic()),
                    completed=status.loaded,
                    total=status.to_load if status.loaded < status.to_load else None,
                )
    return time.monotonic() - began


def _wait_quietly(server: Server, stopper: Stopper) -> None:
    said = ""
    for status in server.starting():
        if stopper.asked:
            break
        stage = describe(status, Loading(), 0.0).partition("  ")[0]
        if stage != said and status.alive and status.phase is not Phase.FAILED:
            console.say(stage)
            said = stage
