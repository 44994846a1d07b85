"""Writes docs/cli.md and docs/settings.md from the code.

python scripts/docs.py            writes them
python scripts/docs.py --check    exit status 1, and which, when they are not up to date
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

from moet.base import env
from moet.cli.main import app

DOCS = Path(__file__).parent.parent / "docs"
NOTE = "<!-- Written by scripts/docs.py from the code. Do not edit. -->\n"

CLI_HEAD = """# The command line

Data goes to stdout and everything else to stderr, so `moet ... --json | jq` works. Errors are two
lines, `error: ...` and `hint: ...`; `moet --debug COMMAND` shows the traceback instead.

| exit status | meaning |
|---|---|
| 0 | all is well; a server ended because it was asked to |
| 1 | it ran and the answer is bad: differences, a failed check, an engine that died |
| 2 | it could not run: usage, a bad input, something missing; a server that did not start |
| 130 | ended by ctrl-C (a server: by a second one) |
"""

SETTINGS_HEAD = """# Settings

Environment variables that every command and every process of a server reads. An unknown `MOET_`
name is an error. What belongs to one model and not to the machine goes to the engine instead:
`moet serve MODEL --additional-config '{"moet": {...}}'`.

| variable | default | meaning |
|---|---|---|
"""


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(``moet bench cpu``, command) of every command that does something."""
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name in sorted(command.commands):
        yield from commands(command.commands[name], f"{path} {name}")


def argument(entry: Any) -> str:
    """The name of a positional argument."""
    return str(entry.metavar or entry.name.upper())


def parameter(entry: Any) -> str:
    """One row: flags, default, help."""
    flags = ", ".join(f"`{flag}`" for flag in entry.opts if flag.startswith("-"))
    name = flags or f"`{argument(entry)}`"
    silent = entry.required or any(entry.default is nothing for nothing in (None, "", False))
    default = "required" if entry.required else "" if silent else f"`{entry.default}`"
    return f"| {name} | {default} | {entry.help} |\n"


def page_of(path: str, command: Any) -> str:
    """The section of one command."""
    rows = [p for p in command.params if p.name != "help"]
    positional = [p for p in rows if not p.opts[0].startswith("-")]
    names = [argument(p) if p.required else f"[{argument(p)}]" for p in positional]
    usage = " ".join([path, *names])
    text = f"\n## {path}\n\n```\n{usage} [options]\n```\n\n{command.help.strip()}\n"
    if rows:
        text += "\n| argument or option | default | |\n|---|---|---|\n" + "".join(
            map(parameter, rows)
        )
    return text


def cli() -> str:
    """docs/cli.md."""
    pages = commands(typer.main.get_command(app), "moet")
    return NOTE + CLI_HEAD + "".join(page_of(path, command) for path, command in pages)


def attributes(docstring: str) -> dict[str, str]:
    """Name -> text of the ``Attributes`` of a docstring."""
    block = docstring.partition("Attributes:")[2]
    entries = re.findall(r"^ {8}(\w+): (.*?)(?=^ {8}\w+: |\Z)", block, re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()).replace("``", "`") for name, text in entries}


def settings() -> str:
    """docs/settings.md."""
    meaning = attributes(env.Settings.__doc__ or "")
    rows = []
    for field in fields(env.Settings):
        default = f"`{field.default}`" if field.default != "" else ""
        name = env.PREFIX + field.name.upper()
        rows.append(f"| `{name}` | {default} | {meaning[field.name]} |\n")
    return NOTE + SETTINGS_HEAD + "".join(rows)


def main(check: bool) -> int:
    """Writes, or compares."""
    stale = []
    for name, text in {"cli.md": cli(), "settings.md": settings()}.items():
        path = DOCS / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.write_text(text)
    if check and stale:
        sys.stderr.write(f"not up to date: {', '.join(stale)}; run python scripts/docs.py\n")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
