"""``moet bench disk``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moet.cli import console, lists


def disk(
    target: Annotated[
        Path, typer.Argument(metavar="PATH", help="A large file, or a folder to write one in.")
    ],
    *,
    record: Annotated[
        str, typer.Option(help="Size of a record; the default is a DeepSeek-V4-Flash expert's.")
    ] = "13369344",
    depths: Annotated[str, typer.Option(help="Records in flight, a list.")] = "1,2,4,8",
    size: Annotated[str, typer.Option(help="Size of the file written in a folder.")] = "4GiB",
    seconds: Annotated[float, typer.Option(help="A turn of each figure.")] = 1.0,
    turns: Annotated[int, typer.Option(help="Turns of each figure.")] = 3,
    queue: Annotated[int, typer.Option(help="Pieces at the disk at once.")] = 16,
    piece: Annotated[str, typer.Option(help="Size of a piece.")] = "1MiB",
    json: Annotated[bool, typer.Option("--json", help="The record as JSON.")] = False,
) -> int:
    """Time random reads of experts beside a plain read of the file.

    Whole experts, against the same file from end to end. Reads past the page cache, as serving
    does, by io_uring and by threads unless MOET_IO names one. In a folder a file of random bytes is
    written first, and removed at the end.
    """
    from moet.base import env
    from moet.base.units import parse_bytes
    from moet.bench import disk as bench
    from moet.bench.disk_table import render
    from moet.cli.progress import shares

    options = bench.Options(
        target=target,
        record_bytes=parse_bytes(record),
        depths=lists.numbers("--depths", depths, "--depths 1,2,4,8"),
        file_bytes=parse_bytes(size),
        seconds=seconds,
        turns=turns,
        mode=env.read().io,
        queue_depth=queue,
        piece=parse_bytes(piece),
    )
    with shares("preparing") as progress:
        found = bench.run(options, progress)
    if json:
        console.write(found.to_json() + "\n")
    else:
        console.out().print(render(found))
    return 0


def register(group: typer.Typer) -> None:
    """Adds the command to ``moet bench``."""
    group.command()(disk)
