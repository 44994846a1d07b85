"""``moet bench memory``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moet.base.errors import UsageError
from moet.cli import console


def memory(
    *,
    config: Annotated[
        str, typer.Option(help="A preset of `moet synth`, or the path of a config.json.")
    ] = "qwen3-30b-a3b",
    layers: Annotated[int, typer.Option(help="Layers to keep; 0: all.")] = 20,
    experts: Annotated[int, typer.Option(help="Experts a layer to keep; 0: all.")] = 0,
    kv_cache: Annotated[str, typer.Option(help="Size of the KV cache.")] = "1GiB",
    prompt: Annotated[int, typer.Option(help="Tokens of the longest prompt.")] = 512,
    answer: Annotated[int, typer.Option(help="Tokens of every answer.")] = 16,
    together: Annotated[int, typer.Option(help="Requests at once.")] = 4,
    folder: Annotated[
        str, typer.Option(help="Where the checkpoints are written meanwhile; empty: TMPDIR.")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="The record as JSON.")] = False,
) -> int:
    """Measure the memory that serving takes beyond the experts.

    Serves a random checkpoint of a real width and the same one with next to no experts, asks both
    the same, and samples the memory of all their processes. Takes minutes, and gigabytes of disk
    meanwhile. Exit status 1: the experts cost more than 1.05 times their bytes and 1 GB.
    """
    from moet.base.units import parse_bytes
    from moet.bench import memory as bench
    from moet.bench.memory_table import render
    from moet.cli.progress import shares

    options = bench.Options(
        config=config,
        layers=layers or None,
        experts=experts or None,
        folder=existing(folder),
        kv_bytes=parse_bytes(kv_cache),
        prompt=prompt,
        answer=answer,
        together=together,
    )
    with shares("preparing") as progress:
        record = bench.run(options, progress)
    if json:
        console.write(record.to_json() + "\n")
    else:
        console.out().print(render(record))
    return 0 if record.rows("limit")[0]["holds"] else 1


def existing(folder: str) -> Path | None:
    """A folder by name; nothing for the empty one.

    Raises:
        UsageError: there is none.
    """
    if folder and not Path(folder).is_dir():
        raise UsageError(f"--folder {folder} is not a folder", hint="make it, or leave it out")
    return Path(folder) if folder else None


def register(group: typer.Typer) -> None:
    """Adds the command to ``moet bench``."""
    group.command()(memory)
