"""``moet doctor``: what this machine can do, what is in the way, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from moet.base.report import Finding, Level
from moet.cli import console

if TYPE_CHECKING:
    from moet.machine import Machine

READY = "you can run: moet serve demo"
RUNNING = "a server runs: moet chat"
NOT_READY = "repair the errors above, then: moet serve demo"


def doctor(
    *,
    engine: Annotated[
        bool, typer.Option("--engine", help="Also import the engine, in a process of its own.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Findings and machine as one JSON object.")
    ] = False,
) -> int:
    """Check this machine: software, processor, memory, disk.

    Each finding says what follows from it and how to repair it. The kernels are run, compared with
    the reference bit for bit, and timed. Exit status 1: something stops moet from serving.
    """
    from moet.cli.doctor import servers
    from moet.machine import read_machine

    machine = read_machine()
    found = []
    for finding in findings(machine, engine=engine):
        found.append(finding)
        if not json:
            console.out().print(console.findings([finding]))
    bad = any(finding.level is Level.ERROR for finding in found)
    if json:
        console.write_json(report(machine, found))
    else:
        ready = RUNNING if any(finding.topic == servers.RUNS for finding in found) else READY
        console.say(NOT_READY if bad else ready, "bold")
    return 1 if bad else 0


def findings(machine: Machine, *, engine: bool) -> Iterator[Finding]:
    """Everything that is looked at, cheap things first."""
    from moet.cli.doctor import memory, processor, servers, software

    yield from software.findings(machine.versions)
    if engine:
        yield software.engine_import()
    yield from processor.findings(machine.cpu)
    yield from processor.measured(machine)
    yield from memory.findings(machine.memory)
    yield from servers.findings()


def report(machine: Machine, found: list[Finding]) -> dict[str, object]:
    """The findings and the snapshot for programs."""
    return {
        "ok": all(finding.level is not Level.ERROR for finding in found),
        "findings": [asdict(finding) for finding in found],
        "machine": asdict(machine),
    }


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(doctor)
