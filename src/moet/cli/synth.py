"""``moet synth``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from moet.base.errors import UsageError
from moet.cli import console

LEAST_SHARD = 1 << 20
MOST_UNASKED = 4 << 30  # bytes that are written without a FOLDER or a cut
SERVED = {"qwen3_moe": "yes", "gpt_oss": "yes", "deepseek_v4": "unmeasured"}  # else: no
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
    without the weights. The folder's path goes to stdout. What can be served gets a tokenizer:

    moet synth qwen3-30b-a3b --layers 2 --experts 8 small-synth && moet serve small-synth
    """
    from moet.checkpoint import synth as maker

    if presets:
        found = [known(name) for name in sorted(maker.PRESETS)]
        if json:
            console.write_json(found)
        else:
            console.write(listing(found))
        return 0
    if not config:
        hint = "moet synth --list prints the presets"
        raise UsageError("a preset or a config.json is needed", hint=hint)
    return write(folder, config, layers, experts, vocab, zipf, seed, shard_size, json=json)


def known(preset: str) -> dict[str, object]:
    """A preset for programs."""
    from moet.checkpoint import synth as maker
    from moet.checkpoint.geometry import read_geometry

    geometry = read_geometry(maker.named_config(preset), Path(preset))
    architecture = geometry.architecture
    return {
        "name": preset,
        "architecture": architecture,
        "bytes": maker.preset_bytes(preset),
        "moe_layers": len(geometry.moe_layers),
        "experts": geometry.experts,
        "top_k": geometry.top_k,
        "serves": SERVED.get(architecture, "no"),
        "published": maker.published_format(preset),
        "complete": architecture in maker.COMPLETE,
    }


def listing(found: list[dict[str, Any]]) -> str:
    """The presets in columns."""
    from moet.base.units import format_bytes

    line = "{:<20} {:>10}  {:<22} {}\n".format
    rows = [
        line(
            preset["name"],
            format_bytes(preset["bytes"]),
            f"{preset['moe_layers']} x {preset['experts']}, top-{preset['top_k']}",
            preset["serves"],
        )
        for preset in found
    ]
    return line("PRESET", "SIZE", "LAYERS x EXPERTS", "CAN BE SERVED") + "".join(rows)


def default_name(config: str, layers: int, experts: int) -> str:
    """``qwen3-30b-a3b-synth-2l-8e``, after the preset or the folder of the config.json."""
    path = Path(config)
    stem = path.resolve().parent.name if path.name.endswith(".json") else path.resolve().name
    cuts = [f"{layers}l"] * bool(layers) + [f"{experts}e"] * bool(experts)
    return "-".join([stem, "synth", *cuts])


def write(  # noqa: PLR0917  (the command's own options, in their order)
    folder: str,
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
    """Writes the checkpoint, the tokenizer where it can be served, and says what was written."""
    from moet import demo
    from moet.base.units import format_bytes, format_rate, format_seconds, parse_bytes
    from moet.checkpoint import synth as maker
    from moet.cli.progress import transfer

    shard_bytes = parse_bytes(shard_size)
    if shard_bytes < LEAST_SHARD:
        hint = f"take {format_bytes(LEAST_SHARD)} or more, for example 4GiB"
        raise UsageError(f"--shard-size {shard_size} is too small", hint=hint)
    published = maker.published_format(config)
    made = maker.model(
        config,
        layers=layers or None,
        experts=experts or None,
        vocab=vocab or None,
        zipf=zipf,
        seed=seed,
    )
    size = format_bytes(made.nbytes)
    if made.nbytes > MOST_UNASKED and not (folder or layers or experts):
        hint = f"name a FOLDER, or cut it: moet synth {config} --layers 2 --experts 8"
        raise UsageError(f"{config} has {size}", hint=hint)
    target = Path(folder or default_name(config, layers, experts))
    console.say(f"writing {size} to {target}; ctrl-C stops", "dim")
    began = time.monotonic()
    with transfer(f"writing {target}") as progress:
        made.write(target, shard_bytes=shard_bytes, progress=progress)
    seconds = time.monotonic() - began
    words = made.config.get("vocab_size", 0)
    lacking = maker.write_tokenizer(target, words, demo.path()) if made.complete else 0
    if json:
        facts = {"folder": str(target), "bytes": made.nbytes, "complete": made.complete}
        facts |= {"published": published, "experts": FORMAT, "seconds": round(seconds, 3)}
        console.write_json(facts)
        return 0
    console.write(f"{target}\n")
    rate = format_rate(made.nbytes / seconds)
    console.say(f"{size} in {format_seconds(seconds)}, {rate}", "dim")
    if published != FORMAT:
        console.say(f"the model's experts are published as {published}; these are {FORMAT}")
    if not made.complete:
        console.say("routers and experts only: for moet's own measurements, not for serving")
    elif lacking:
        console.say(f"no tokenizer, so not for serving: it needs {lacking} words, --vocab is less")
    elif vocab and made.geometry.architecture == "gpt_oss":
        console.say("chats of gpt-oss need all words: with --vocab only /v1/completions is served")
    return 0


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(synth)
