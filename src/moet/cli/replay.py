"""``moet replay``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moet.base.errors import UsageError
from moet.cli import console, lists

if TYPE_CHECKING:
    from moet.bench.record import Record
    from moet.bench.replay import Options
    from moet.cli.progress import Share
    from moet.hybrid.trace import Trace


def replay(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="A recorded trace; none: one is made.")
    ] = "",
    *,
    budgets: Annotated[str, typer.Option(help="Memory, in percent of all experts.")] = "50,25,10",
    policies: Annotated[
        str, typer.Option(help="lru, slru, lfu, heat, and the optimum of who knows the future.")
    ] = "lru,slru,lfu,heat,optimum",
    record: Annotated[str, typer.Option(help="Size of an expert.")] = "13MiB",
    bandwidth: Annotated[str, typer.Option(help="Of the disk, a second.")] = "5GB",
    skip: Annotated[float, typer.Option(help="Percent of the steps that only warm up.")] = 25.0,
    window: Annotated[int, typer.Option(help="Slots of the window; -1: chosen.")] = -1,
    layers: Annotated[int, typer.Option(help="Made: MoE layers.")] = 8,
    experts: Annotated[int, typer.Option(help="Made: experts a layer.")] = 128,
    top_k: Annotated[int, typer.Option(help="Made: experts a token.")] = 8,
    steps: Annotated[int, typer.Option(help="Made: decode steps.")] = 1000,
    streams: Annotated[int, typer.Option(help="Made: tokens a step.")] = 1,
    zipf: Annotated[float, typer.Option(help="Made: exponent of the choice of experts.")] = 1.0,
    drift: Annotated[
        float, typer.Option(help="Made: share of a layer's experts that trade ranks in 1000 steps.")
    ] = 0.5,
    prompt_every: Annotated[int, typer.Option(help="Made: steps between prompts; 0: none.")] = 200,
    prompt_tokens: Annotated[int, typer.Option(help="Made: tokens of a prompt.")] = 512,
    seed: Annotated[int, typer.Option(help="Made: the same seed makes the same trace.")] = 0,
    model: Annotated[
        str, typer.Option(help="Read the experts of this model's pack for real, instead.")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="The record as JSON.")] = False,
) -> int:
    """Replay a routing trace: what each policy would find in memory, read and wait for.

    Drives the policies of the cascade without an engine or a disk: the stall is what a disk of that
    bandwidth would need for the bytes that were not in memory. Recorded heat is that of the steps
    which only warm up. With --model the same calls go through memory and the disk of its pack, and
    the stall is measured; the optimum, sizes and bandwidth are not asked for then.
    """
    from moet.base.units import parse_bytes
    from moet.bench import replay as bench
    from moet.cli.progress import shares
    from moet.hybrid.trace import read_trace

    made = {
        "layers": layers, "experts": experts, "top_k": top_k, "steps": steps, "streams": streams,
        "zipf": zipf, "drift": drift, "prompt_every": prompt_every,
        "prompt_tokens": prompt_tokens, "seed": seed,
    }  # fmt: skip
    calls = read_trace(Path(trace)) if trace else make(made)
    options = bench.Options(
        trace=calls, source={"trace": trace} if trace else {"made": made},
        policies=lists.words("--policies", policies, "--policies lru,lfu"),
        budgets=tuple(percents(budgets)), record_bytes=parse_bytes(record),
        bandwidth=float(parse_bytes(bandwidth)),
        skip=skip / 100, window=None if window < 0 else window,
    )  # fmt: skip
    with shares("replaying") as progress:
        result = for_real(model, options, progress) if model else bench.run(options, progress)
    show(result, json=json, disk=bool(model))
    return 0


def show(record: Record, *, json: bool, disk: bool) -> None:
    """What was found: as JSON, or a table."""
    from moet.bench.render_replay import render, render_disk

    if json:
        console.write(record.to_json() + "\n")
    else:
        console.out().print(render_disk(record) if disk else render(record))


def for_real(model: str, options: Options, progress: Share) -> Record:
    """The same through the memory and the disk of a model's pack."""
    from moet.bench import replay_disk
    from moet.bench.replay import BEST
    from moet.cli.pack import find
    from moet.tiers.nvme import NvmeTier
    from moet.tiers.pack_source import PackSource

    pack = find(model, [], full=False)
    asked = replay_disk.Options(
        trace=options.trace,
        source={**options.source, "model": model},
        policies=tuple(name for name in options.policies if name != BEST),
        budgets=options.budgets,
        skip=options.skip,
        window=options.window,
    )
    with pack.hold(), NvmeTier(PackSource(pack)) as below:
        return replay_disk.run(asked, below, progress)


def make(like: dict[str, Any]) -> Trace:
    """A made trace."""
    from moet.hybrid.trace_synthetic import Synthetic, make_trace

    return make_trace(Synthetic(**like))


def percents(text: str) -> list[float]:
    """``"50,12.5"`` as shares."""
    shares = []
    for part in lists.words("--budgets", text, "--budgets 50,25,10"):
        try:
            shares.append(float(part) / 100)
        except ValueError as error:
            hint = "--budgets 50,25,10"
            raise UsageError(f"--budgets {part!r} is not a number", hint=hint) from error
    return shares


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(replay)
