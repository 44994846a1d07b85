"""``moet bench``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from moet.base.errors import UsageError
from moet.cli import bench_gpu, console, disk, lists, memory

if TYPE_CHECKING:
    from moet.kernels.spec import ActFormat

app = typer.Typer(
    name="bench",
    help="Measure this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def group() -> None:
    """Measure this machine."""


@app.command()
def cpu(
    *,
    tokens: Annotated[str, typer.Option(help="Tokens a step, a list.")] = "1,2,4,8,16,64",
    threads: Annotated[str, typer.Option(help="Threads, a list; empty: 1 and all cores.")] = "",
    act: Annotated[str, typer.Option(help="Activation formats: int8, int16.")] = "int8,int16",
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 4096,
    intermediate: Annotated[int, typer.Option(help="Width of an expert.")] = 2048,
    experts: Annotated[int, typer.Option(help="Experts of the layer.")] = 64,
    top_k: Annotated[int, typer.Option(help="Experts a token.")] = 6,
    samples: Annotated[int, typer.Option(help="Steps a figure, at least.")] = 15,
    busy: Annotated[int, typer.Option(help="Also beside so many busy processes.")] = 0,
    peers: Annotated[
        str, typer.Option(help="Other engines to measure: names, `all` installed ones, or `none`.")
    ] = "all",
    json: Annotated[bool, typer.Option("--json", help="The record as JSON.")] = False,
) -> int:
    """Time one MoE layer on the CPU beside its read bandwidth.

    The layer is DeepSeek-V4-Flash's unless sizes are given. MOET_ISA forces an instruction set.
    """
    from moet.base import env
    from moet.bench import cpu as bench
    from moet.bench.render import render
    from moet.bench.rig import Shape
    from moet.cli.progress import shares

    shape = Shape(hidden=hidden, intermediate=intermediate, experts=experts, top_k=top_k)
    options = bench.Options(
        shape=shape,
        acts=acts(act),
        tokens=lists.numbers("--tokens", tokens, "--tokens 1,2,8"),
        threads=lists.numbers("--threads", threads, "--threads 1,2") if threads else None,
        samples=samples,
        isa=env.read().isa,
        busy=busy,
        peers=named(peers),
    )
    with shares("preparing") as progress:
        record = bench.run(options, progress)
    if json:
        console.write(record.to_json() + "\n")
    else:
        console.out().print(render(record))
    return 0


def acts(text: str) -> tuple[ActFormat, ...]:
    """``"int8,int16"`` as formats."""
    from moet.kernels.spec import ActFormat

    known = {"int8": ActFormat.MXINT8, "int16": ActFormat.MXINT16}
    names = lists.words("--act", text, "--act int8,int16")
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"--act {unknown[0]!r} is not a format", hint="int8, int16 or both")
    return tuple(known[name] for name in names)


def named(text: str) -> tuple[str, ...] | None:
    """``all`` as None, ``none`` as nothing, else a list of names."""
    if text == "all":
        return None
    return () if text == "none" else lists.words("--peers", text, "--peers all, or none")


def register(parent: typer.Typer) -> None:
    """Adds the group."""
    memory.register(app)
    disk.register(app)
    bench_gpu.register(app)
    parent.add_typer(app)
