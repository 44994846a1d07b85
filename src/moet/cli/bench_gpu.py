"""``moet bench step`` and ``moet bench moe``: a GPU with and without the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moet.cli import card, console, lists

if TYPE_CHECKING:
    from rich.console import RenderableType

    from moet.bench.record import Record
    from moet.kernels.spec import LayerSpec

Json = Annotated[bool, typer.Option("--json", help="The record as JSON.")]
Device = Annotated[int, typer.Option(help="Which GPU, as the driver counts.")]


def step(
    *,
    layer: Annotated[str, typer.Option(help="A layer: v4.1-flash or v4-flash.")] = "v4.1-flash",
    hidden: Annotated[int, typer.Option(help="Another width of the model.")] = 0,
    intermediate: Annotated[int, typer.Option(help="Another width of an expert.")] = 0,
    experts: Annotated[int, typer.Option(help="Another number of experts.")] = 0,
    top_k: Annotated[int, typer.Option(help="Other experts a token.")] = 0,
    layers: Annotated[
        int, typer.Option(help="Layers of a step, each with experts of its own.")
    ] = 4,
    tokens: Annotated[str, typer.Option(help="Tokens a step, a list.")] = "1,4,8,16,64",
    percent: Annotated[
        str, typer.Option(help="Shares of the routings whose experts are on the card, a list.")
    ] = "0,25,50,75,100",
    variants: Annotated[
        str, typer.Option(help="How the card waits: auto, all, or some of poll, memop, hostfunc.")
    ] = "auto",
    replays: Annotated[int, typer.Option(help="Steps a figure.")] = 50,
    device: Device = 0,
    json: Json = False,
) -> int:
    """Time steps that card and CPU share, beside each alone.

    Per way to wait, share and tokens, in microseconds a layer: the hybrid step (one CUDA graph of
    all layers, new random experts in every replay), the card alone, the CPU alone, the mailbox
    alone, and the limit: 1.05 x the slower of the two alone + 5 us and, where the CPU is asked, the
    mailbox's round trip without the CPU's part. One core is left to the thread that launches.
    The experts are random and take their full size in memory: 29 GB for four layers of
    DeepSeek-V4.1-Flash. Exit status 1: a limit does not hold.
    """
    from moet.base import env
    from moet.bench import step as bench
    from moet.bench.render_gpu import render_step
    from moet.cli.progress import shares

    spec = _spec(layer, hidden=hidden, intermediate=intermediate, experts=experts, top_k=top_k)
    options = bench.Options(
        spec=spec,
        layers=layers,
        tokens=lists.numbers("--tokens", tokens, "--tokens 1,8"),
        percents=lists.numbers("--percent", percent, "--percent 0,50,100"),
        replays=replays,
        isa=env.read().isa,
    )
    with card.opened(device) as (opened, pool), shares("preparing") as progress:
        options = replace(options, variants=card.variants(variants, opened, pool))
        record = bench.run(opened, pool, options, progress)
    _show(record, render_step(record), json)
    return 0 if all(row["holds"] for row in record.rows("step")) else 1


def _spec(name: str, **sizes: int) -> LayerSpec:
    """A preset with some of its sizes replaced."""
    from moet.bench.rig import Shape

    spec = card.preset(name)
    given = {key: size for key, size in sizes.items() if size}
    shape = Shape(**{key: given.get(key, getattr(spec, key)) for key in sizes})
    return replace(
        spec,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        experts=shape.experts,
        top_k=shape.top_k,
    )


def moe(
    *,
    layer: Annotated[str, typer.Option(help="Layers, a list.")] = "v4-flash,v4.1-flash",
    tokens: Annotated[str, typer.Option(help="Tokens a step, a list.")] = "1,2,4,8,16,32,64",
    launches: Annotated[bool, typer.Option("--launches", help="Each kernel alone too.")] = False,
    against: Annotated[
        Path | None, typer.Option(help="Times of others on this card, a JSON file.")
    ] = None,
    device: Device = 0,
    json: Json = False,
) -> int:
    """Time the GPU's kernels alone beside a read-only kernel.

    All experts are on the card. From top-k ids to combined rows, routing included, in CUDA graphs
    over new random experts. Others are measured elsewhere in the same session; their file names the
    layer (hidden, intermediate, experts, top_k) and has results of who, tokens and us.
    """
    from moet.bench import moe as bench
    from moet.bench.render_gpu import render_moe
    from moet.cli.progress import shares

    names = lists.words("--layer", layer, "--layer v4-flash")
    shapes = {name: card.preset(name) for name in names}
    options = bench.Options(
        shapes=shapes,
        tokens=lists.numbers("--tokens", tokens, "--tokens 1,4,8"),
        launches=launches,
        others={} if against is None else bench.read_others(against, shapes),
    )
    with card.opened(device) as (opened, _), shares("preparing") as progress:
        record = bench.run(opened.gpu, options, progress)
    _show(record, render_moe(record), json)
    return 0


def _show(record: Record, tables: RenderableType, json: bool) -> None:
    if json:
        console.write(record.to_json() + "\n")
    else:
        console.out().print(tables)


def register(app: typer.Typer) -> None:
    """Adds the commands to the group ``bench``."""
    app.command()(step)
    app.command()(moe)
