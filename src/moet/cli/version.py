"""``moet version``."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer

from moet.cli import console

SHOWN = ("python", "vllm", "torch", "transformers", "numpy", "linux")


def version(
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Print the version of moet and of what it runs on."""
    from moet.machine.versions import read_versions

    found = read_versions()
    if json:
        console.write(jsonlib.dumps(found) + "\n")
        return
    rest = ", ".join(f"{name} {found[name]}" for name in SHOWN if name in found)
    console.write_line(f"moet {found.get('moet', 'not installed')} ({rest})")


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(version)
