"""Bars on stderr for what takes longer than a glance; silent where stderr is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from moet.cli import console

Share = Callable[[str, float], None]
Bytes = Callable[[int, int], None]


def _bar(*columns: ProgressColumn) -> Progress:
    stream = console.err()
    text = TextColumn("{task.description}", markup=False)
    return Progress(
        text, BarColumn(), *columns, console=stream, transient=True, disable=not stream.is_terminal
    )


@contextmanager
def shares(title: str) -> Iterator[Share]:
    """A bar that is told what is being done and which part of it is, 0 to 1."""
    with _bar(TimeElapsedColumn()) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)


@contextmanager
def transfer(title: str) -> Iterator[Bytes]:
    """A bar that is told (done, all) bytes; shows the rate and the time left."""
    with _bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
