"""``moet verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from moet.base.errors import UsageError
from moet.cli import console, lists

if TYPE_CHECKING:
    from moet.verify.bits import BitsReport
    from moet.verify.quality import Quality

app = typer.Typer(
    name="verify",
    help="Prove that answers are right: bit for bit, and by marks.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def group() -> None:
    """Prove that answers are right: bit for bit, and by marks."""


@app.command()
def bits(
    *,
    outputs: Annotated[int, typer.Option(help="Numbers to compare, at least.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="Other layers.")] = 0,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="A GPU's kernels and the hybrid step, with the CPU's.")
    ] = False,
    faults: Annotated[
        bool, typer.Option("--faults", help="With --gpu: also stop, slow and corrupt it.")
    ] = False,
    device: Annotated[int, typer.Option(help="With --gpu: which, as the driver counts.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> int:
    """Compare every kernel with the reference, bit for bit.

    Random layers; all instruction sets that this machine has, or the one that MOET_ISA names; 1 to
    3 threads, batches of 1 to 64 tokens, every format and gate; half of the outputs come from
    layers as wide as real ones. Exit status 1: an output differs.

    With --gpu the CPU's kernels are the reference: the card's kernels alone, then whole steps with
    no, all and 50 or more random splits of the experts between card and CPU, eager and replayed,
    while other experts are uploaded. It needs 30 GB of the host's memory and of the card's.
    """
    if gpu:
        from moet.cli import verify_gpu

        return verify_gpu.bits(outputs, seed, faults=faults, device=device, json=json)
    if faults or device:
        raise UsageError("--faults and --device are of --gpu", hint="moet verify bits --gpu")
    from moet.base import env
    from moet.cli.progress import shares
    from moet.verify import bits as exam

    with shares("comparing") as progress:
        report = exam.run(outputs, seed, progress, env.read().isa)
    if json:
        console.write_json(report.as_dict())
    else:
        console.out().print(console.facts(bits_rows(report)))
    return 0 if report.passed else 1


def bits_rows(report: BitsReport) -> list[tuple[str, str]]:
    """A report for people."""
    from moet.base.units import format_seconds

    rows = [
        (isa, f"{report.differing[isa]:,} of {compared:,} outputs differ from the reference")
        for isa, compared in report.compared.items()
    ]
    rows.append(("reference", f"{report.outputs:,} outputs, {report.deep:,} with K >= 2048"))
    rows.append(("layers", f"{report.cases}, seed {report.seed}, {format_seconds(report.seconds)}"))
    return [*rows, ("first", report.first)] if report.first else rows


@app.command()
def quality(
    *,
    url: Annotated[
        str, typer.Option(help="A server. Without: the newest that runs here, else a new one.")
    ] = "",
    model: Annotated[
        str, typer.Option(help="Start a server for this folder, or `demo`, and end it after.")
    ] = "",
    kinds: Annotated[
        str, typer.Option(help="What to ask, a list: addition, recall, json, text, ...")
    ] = "addition,subtraction,multiplication,recall,json,text",
    each: Annotated[int, typer.Option(help="Questions a kind.")] = 100,
    seed: Annotated[int, typer.Option(help="Other questions.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> int:
    """Mark a served model on sums, recall, JSON and stories.

    Of stories it is the perplexity. The questions are those of the demo model, held out from its
    training. Exit status 1: the demo model misses what it is made to reach.
    """
    from moet import demo
    from moet.cli.chat import connected
    from moet.cli.progress import shares
    from moet.cli.served import ServedModel
    from moet.demo import tasks
    from moet.verify import quality as exam

    wanted = lists.words("--kinds", kinds, f"kinds are {', '.join(tasks.KINDS)}")
    exam.require_questions(wanted, each)
    with connected(url, model) as client, shares("asking") as progress:
        aims = exam.AIMS if client.model == demo.NAME else {}
        result = exam.measure(
            ServedModel(client),
            client.model,
            kinds=wanted,
            each=each,
            seed=seed,
            aims=aims,
            progress=progress,
        )
    if json:
        console.write_json(result.as_dict())
    else:
        show(result, aims)
    return 1 if result.missed else 0


def show(result: Quality, aims: dict[str, float]) -> None:
    """The figures as a table."""
    from rich.table import Table

    table = Table(title=f"{result.model}, seed {result.seed}", title_justify="left")
    for column in ("task", "right", "of", "share", "aim"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for score in result.scores:
        style = "red" if score.name in result.missed else ""
        aim = f"{aims[score.name]:.0%}" if score.name in aims else ""
        share = f"{score.share:.1%}" if score.asked else "-"
        table.add_row(score.name, str(score.right), str(score.asked), share, aim, style=style)
    if result.perplexity is not None:
        table.add_row("perplexity of stories", "", "", f"{result.perplexity:.3f}", "")
    console.out().print(table)


def register(parent: typer.Typer) -> None:
    """Adds the group."""
    parent.add_typer(app)
