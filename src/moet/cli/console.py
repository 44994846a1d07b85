"""Where the command line writes: data to stdout, talk to stderr; colour only where it is wanted."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moet.base import env, jsontext
from moet.base.errors import MoetError
from moet.base.report import Finding, Level

PIPE_WIDTH = 120  # columns of a table that is written into a file or a pipe

STYLES = {Level.OK: "green", Level.INFO: "cyan", Level.WARN: "yellow", Level.ERROR: "bold red"}
MARKS = {Level.OK: "ok", Level.INFO: "info", Level.WARN: "warn", Level.ERROR: "error"}

COMMANDS = ("serve", "chat", "doctor", "pack", "verify", "bench", "synth", "replay", "version")
_CALL = re.compile(rf"(?<![\w./-])moet (?=(?:{'|'.join(COMMANDS)})\b|--debug|--help)")


def called(text: str) -> str:
    """A text with calls of moet as they have to be typed: ``./moet serve demo`` in a clone."""
    return _CALL.sub(lambda _: f"{env.program()} ", text)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


def out() -> Console:
    """stdout: what a program may read."""
    return _console(stderr=False)


def err() -> Console:
    """stderr: what a person reads."""
    return _console(stderr=True)


def write(text: str) -> None:
    """Data, as it is, to stdout; ``?`` for a character that its encoding does not have."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def write_line(text: str) -> None:
    """A line of data: folded at blanks where a person reads it, one line elsewhere."""
    if sys.stdout.isatty():
        out().print(Text(text))
    else:
        write(f"{text}\n")


def write_json(value: Any) -> None:
    """One JSON value to stdout, indented."""
    write(jsontext.dumps(value) + "\n")


def say(message: str, style: str = "") -> None:
    """A line of talk, below the data that came before it."""
    with suppress(OSError):  # told when the program ends: the data is kept until then
        sys.stdout.flush()
    err().print(Text(called(message), style=style))


def leave_line() -> None:
    """After a ctrl-C on a terminal: what follows begins on a line of its own, below ``^C``."""
    if sys.stderr.isatty():
        err().print()


def show_error(error: MoetError) -> None:
    """``error: ...`` and ``hint: ...`` on stderr."""
    tell("error", "bold red", str(error))
    if error.hint:
        tell("hint", "cyan", called(error.hint))


def tell(label: str, style: str, message: str) -> None:
    """``label: message`` on stderr: folded at blanks on a terminal, one line elsewhere."""
    with suppress(OSError):
        sys.stdout.flush()
    stream = err()
    line = Text.assemble((f"{label}:", style), " ", message)
    stream.print(line, soft_wrap=not sys.stderr.isatty())


def facts(rows: list[tuple[str, str]]) -> Table:
    """Names and values side by side, without lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(called(value)))
    return table


def findings(report: list[Finding]) -> Table:
    """A report as a table: mark, topic, fact; what follows and what to do below the fact."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=5)
    table.add_column(style="bold", no_wrap=True, min_width=15)
    table.add_column(overflow="fold")
    for finding in report:
        text = Text(finding.fact)
        if finding.consequence:
            text.append(f"\n{called(finding.consequence)}", style="dim")
        if finding.fix:
            text.append("\nfix: ", style="cyan").append(called(finding.fix))
        table.add_row(Text(MARKS[finding.level], STYLES[finding.level]), finding.topic, text)
    return table
