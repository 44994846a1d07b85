"""``moet synth``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from moet.base.errors import UsageError
from moet.cli import console

LEAST_SHARD = 1 << 20
FORMAT = "MXFP4"  # of every expert that is written


def synth(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A preset, or the path of a config.json.")
    ] = "",
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Where to write; named after CONFIG without.")
    ] = "",
    *,
    layers: Annotated[int, typer.Option(help="Layers to keep; 0: all.")] = 0,
    experts: Annotated[int, typer.Option(help="Experts a layer to keep; 0: all.")] = 0,
    vocab: Annotated[int, typer.Option(help="Words to keep; 0: all.")] = 0,
    zipf: Annotated[float, typer.Option(help="Skew of the routers: a Zipf exponent.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed writes the same bytes.")] = 0,
    shard_size: Annotated[str, typer.Option(help="Longest file.")] = "4GiB",
    presets: Annotated[bool, typer.Option("--list", help="Print the presets and leave.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> int:
    """Write a checkpoint with random weights.

    Of a real geometry, in the model's own file layout: for measuring speed and bits at full width
    without the weights. The folder's path goes to stdout.
    """
    from moet.checkpoint import synth as maker

    if presets:
        names = sorted(maker.PRESETS)
        if json:
            console.write_json([known(name) for name in names])
        else:
            console.write("".join(f"{name}\n" for name in names))
        return 0
    if not config:
        hint = "moet synth --list prints the presets"
        raise UsageError("a preset or a config.json is needed", hint=hint)
    target = Path(folder or default_name(config, layers, experts))
    return write(target, config, layers, experts, vocab, zipf, seed, shard_size, json=json)


def known(preset: str) -> dict[str, object]:
    """A preset for programs."""
    from moet.checkpoint import synth as maker

    architecture = maker.named_config(preset)["model_type"]
    return {
        "name": preset,
        "architecture": architecture,
        "published": maker.published_format(preset),
        "complete": architecture in maker.COMPLETE,
    }


def default_name(config: str, layers: int, experts: int) -> str:
    """``qwen3-30b-a3b-synth-2l-8e``, after the preset or the folder of the config.json."""
    path = Path(config)
    stem = path.resolve().parent.name if path.name.endswith(".json") else path.resolve().name
    cuts = [f"{layers}l"] * bool(layers) + [f"{experts}e"] * bool(experts)
    return "-".join([stem, "synth", *cuts])


def write(  # noqa: PLR0917  (the command's own options, in their order)
    target: Path,
    config: str,
    layers: int,
    experts: int,
    vocab: int,
    zipf: float,
    seed: int,
    shard_size: str,
    *,
    json: bool,
) -> int:
    """Writes the checkpoint and says what was written."""
    from moet.base.units import format_bytes, format_rate, format_seconds, parse_bytes
    from moet.checkpoint import synth as maker
    from moet.cli.progress import transfer

    shard_bytes = parse_bytes(shard_size)
    if shard_bytes < LEAST_SHARD:
        hint = f"take {format_bytes(LEAST_SHARD)} or more, for example 4GiB"
        raise UsageError(f"--shard-size {shard_size} is too small", hint=hint)
    published = maker.published_format(config)
    began = time.monotonic()
    with transfer(f"writing {target}") as progress:
        made = maker.write(
            config,
            target,
            layers=layers or None,
            experts=experts or None,
            vocab=vocab or None,
            zipf=zipf,
            seed=seed,
            shard_bytes=shard_bytes,
            progress=progress,
        )
    seconds = time.monotonic() - began
    if json:
        facts = {"folder": str(target), "bytes": made.nbytes, "complete": made.complete}
        facts |= {"published": published, "experts": FORMAT, "seconds": round(seconds, 3)}
        console.write_json(facts)
        return 0
    console.write(f"{target}\n")
    rate = format_rate(made.nbytes / seconds)
    console.say(f"{format_bytes(made.nbytes)} in {format_seconds(seconds)}, {rate}", "dim")
    if published != FORMAT:
        console.say(f"the model's experts are published as {published}; these are {FORMAT}")
    if not made.complete:
        console.say("routers and experts only: for moet's own measurements, not for serving")
    return 0


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(synth)
