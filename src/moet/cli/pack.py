"""``moet pack``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from moet.base.errors import UsageError
from moet.cli import console

if TYPE_CHECKING:
    from moet.pack.check import CheckReport
    from moet.pack.reader import Pack
    from moet.pack.registry import Entry
    from moet.pack.writer import WriteReport

DEFAULT = "write"
SHOWN = 20  # bad records of a check that are named one by one


class PackGroup(TyperGroup):
    """``moet pack MODEL`` is ``moet pack write MODEL``: what is no subcommand is a model."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the name of the default command in front where none is."""
        if args and args[0] not in {*self.commands, "-h", "--help"}:
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="pack",
    cls=PackGroup,
    help="Keep a model's experts on disk as they lie in memory.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Out = Annotated[
    list[str] | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Where packs are kept; again for every further disk. Default: packs in the cache.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


@app.callback()
def group() -> None:
    """Keep a model's experts on disk as they lie in memory: `moet pack MODEL`."""


@app.command(DEFAULT)
def write(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The checkpoint, or `demo`.")],
    *,
    out: Out = None,
    threads: Annotated[int, typer.Option(help="Threads; 0: by the machine.")] = 0,
    check: Annotated[
        bool,
        typer.Option("--check", help="Check the pack, instead. MODEL may be the pack's folder."),
    ] = False,
    against: Annotated[
        bool,
        typer.Option("--against", help="With --check: compare with the checkpoint byte by byte."),
    ] = False,
    full: Annotated[
        bool,
        typer.Option("--full", help="Hash all bytes of the checkpoint too: a copy is recognised."),
    ] = False,
    json: Json = False,
) -> int:
    """Write the pack of a model, or check it. `write` may be left out: `moet pack MODEL`.

    A pack holds every routed expert as it lies in memory: for models that are larger than memory,
    and for fast starts. It is as large as the experts. A run that was stopped goes on where it was;
    where the pack is there already nothing is written. The folder goes to stdout. Exit status of
    --check: 1 where a record is bad.
    """
    if against and not check:
        raise UsageError("--against belongs to --check", hint="moet pack --check --against MODEL")
    folders = [Path(folder) for folder in out or ()]
    if check:
        return check_one(model, folders, threads, against=against, full=full, json=json)
    return write_one(model, folders, threads, full=full, json=json)


def write_one(model: str, folders: list[Path], threads: int, *, full: bool, json: bool) -> int:
    """Writes the pack and says what was done."""
    from moet.checkpoint import open_checkpoint
    from moet.cli.progress import transfer
    from moet.engine.preflight import find_model
    from moet.pack.registry import default_folder, stale_packs
    from moet.pack.writer import write_pack

    checkpoint = open_checkpoint(find_model(model)[0])
    places = folders or [default_folder()]
    try:
        with transfer("packing") as progress:
            report = write_pack(
                checkpoint, places, threads=threads, hash_contents=full, progress=progress
            )
    except KeyboardInterrupt:
        console.say("what is written so far is kept: the same command goes on from there")
        raise
    show_written(report, json=json)
    for stale in stale_packs(checkpoint, places):
        what = "a pack of this checkpoint as it was before is there too"
        console.tell("note", "cyan", f"{what}: moet pack rm {stale}")
    return 0


def show_written(report: WriteReport, *, json: bool) -> None:
    """The folder as data, the rest as talk."""
    from moet.base.units import format_bytes, format_rate, format_seconds

    if json:
        facts = {**report.__dict__, "folder": str(report.folder), "bytes_per_s": report.rate}
        facts["bytes"] = facts.pop("nbytes")
        console.write_json(facts | {"seconds": round(report.seconds, 3)})
        return
    console.write(f"{report.folder}\n")
    if report.kept == report.records:
        console.say(f"the pack is there already: {report.records} records", "dim")
        return
    took = f"{format_seconds(report.seconds)}, {format_rate(report.rate)}"
    console.say(f"{report.records} records, {format_bytes(report.nbytes)} in {took}", "dim")
    if report.kept:
        console.say(f"{report.kept} of them were there from an earlier run and are whole", "dim")


def check_one(
    model: str, folders: list[Path], threads: int, *, against: bool, full: bool, json: bool
) -> int:
    """Checks the pack of a model, or the pack of that name."""
    from moet.checkpoint import open_checkpoint
    from moet.cli.progress import transfer
    from moet.pack.check import check_pack

    pack = find(model, folders, full=full)
    checkpoint = open_checkpoint(pack.plan.source) if against else None
    with transfer(f"checking {pack.folder.name}") as progress:
        report = check_pack(pack, checkpoint, threads=threads, progress=progress)
    show_checked(pack, report, json=json)
    return 0 if report.passed else 1


def find(model: str, folders: list[Path], *, full: bool) -> Pack:
    """The pack that a command line means: by its own folder, or by its model.

    Raises:
        BrokenPack: it cannot be opened, or there is none.
    """
    from moet.checkpoint import open_checkpoint
    from moet.engine.preflight import find_model
    from moet.pack.faults import BrokenPack, PackFault
    from moet.pack.identity import SUFFIX
    from moet.pack.reader import open_pack
    from moet.pack.registry import default_folder, find_pack

    if Path(model).name.endswith(SUFFIX):
        return open_pack(Path(model))
    checkpoint = open_checkpoint(find_model(model)[0])
    found = find_pack(checkpoint, folders)
    if found is None:
        where = folders[0] if folders else default_folder()
        raise BrokenPack(PackFault.NO_PACK, where, f"there is no pack of {model}")
    return open_pack(found, checkpoint, full=full)


def show_checked(pack: Pack, report: CheckReport, *, json: bool) -> None:
    """What a check has found."""
    from moet.base.units import format_bytes, format_rate, format_seconds

    if json:
        facts = {"folder": str(pack.folder), "passed": report.passed, "records": report.records}
        facts |= {"bytes": report.nbytes, "compared": report.compared}
        facts |= {"seconds": round(report.seconds, 3), "bad": [bad.as_dict() for bad in report.bad]}
        console.write_json(facts)
        return
    rate = format_rate(report.nbytes / report.seconds)
    size = f"{format_bytes(report.nbytes)}, {format_seconds(report.seconds)}, {rate}"
    with_what = "checksums and the checkpoint" if report.compared else "checksums"
    rows = [
        ("pack", str(pack.folder)),
        ("compared", f"{report.records} records with their {with_what}: {size}"),
        ("bad", str(len(report.bad) or "none")),
    ]
    for bad in report.bad[:SHOWN]:
        place = f"layer {bad.key.layer} expert {bad.key.expert}, {bad.file} at {bad.offset}"
        rows.append(("", f"{place}: {bad.what}"))
    if len(report.bad) > SHOWN:
        rows.append(("", f"and {len(report.bad) - SHOWN} more: --json names all"))
    console.out().print(console.facts(rows))


@app.command("list")
def list_(*, out: Out = None, json: Json = False) -> int:
    """Show the packs that there are: size, state, who uses them, and of what they are.

    complete: it can be used. stale: its checkpoint has changed since. unfinished: its writing was
    stopped, and `moet pack MODEL` goes on. damaged: it cannot be opened.
    """
    from moet.pack.registry import default_folder, list_packs

    folders = [Path(folder) for folder in out or ()]
    entries = list_packs(folders)
    if json:
        console.write_json([entry.as_dict() for entry in entries])
    elif entries:
        show_list(entries)
    else:
        console.say(f"no packs in {', '.join(map(str, folders or [default_folder()]))}")
    return 0


def state_of(entry: Entry) -> Text:
    """The state of a pack, coloured; how far an unfinished one is."""
    state = entry.state.value
    style = {"complete": "green", "damaged": "bold red"}.get(state, "yellow")
    count = f" {entry.records} of {entry.total}" if state == "unfinished" else ""
    return Text(state + count, style)


def show_list(entries: list[Entry]) -> None:
    """A table, and what is wrong below it."""
    from rich.table import Table

    from moet.base.units import format_bytes

    table = Table()
    for column in ("pack", "size", "state", "used", "checkpoint"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for entry in entries:
        size, used = format_bytes(entry.nbytes), "yes" if entry.used else "no"
        cells = Text(entry.folder.name), size, state_of(entry), used, Text(entry.source)
        table.add_row(*cells)
    console.out().print(table)
    for entry in entries:
        if entry.problem:
            console.tell("problem", "yellow", entry.problem)


@app.command("rm")
def remove(
    packs: Annotated[
        list[str],
        typer.Argument(metavar="PACK...", help="Folders of packs, or names as `list` shows them."),
    ],
    *,
    out: Out = None,
    json: Json = False,
) -> int:
    """Remove packs, whole or unfinished. One that a process uses is refused."""
    from moet.base.units import format_bytes
    from moet.pack.registry import default_folder, remove_pack

    places = [Path(folder) for folder in out or ()] or [default_folder()]
    removed = []
    for folder in [located(name, places) for name in packs]:
        nbytes = remove_pack(folder)
        removed.append({"folder": str(folder), "bytes": nbytes})
        console.say(f"removed {folder}: {format_bytes(nbytes)}", "dim")
    if json:
        console.write_json(removed)
    return 0


def located(name: str, places: list[Path]) -> Path:
    """The folder of a pack by its path, or by its name in one of some places.

    Raises:
        BrokenPack: there is none.
    """
    from moet.pack.faults import BrokenPack, PackFault

    candidates = [Path(name), *(place / name for place in places if "/" not in name)]
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise BrokenPack(PackFault.NO_PACK, candidates[-1], "there is no such pack")


def register(parent: typer.Typer) -> None:
    """Adds the group."""
    parent.add_typer(app)
