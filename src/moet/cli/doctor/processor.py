"""Findings about the processor: what it has, and what the kernels do on it, measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moet.base import env
from moet.base.errors import MoetError
from moet.base.report import Finding, Level
from moet.base.units import format_rate
from moet.machine import Cpu, Machine

if TYPE_CHECKING:
    from moet.cli.doctor.measure import Speeds

MEASURE_BYTES = 2 << 30  # free memory below which nothing is timed
SLOW = 0.5  # of the read bandwidth: below it, something is wrong, or the machine is busy
BUSY = 0.5  # processes that want to run, of the usable cores: from there on figures mean little
TURNS = 3  # measurements at most, while one looks slow


def findings(cpu: Cpu) -> Iterator[Finding]:
    """What the kernel says about the processor."""
    yield Finding(level=Level.INFO, topic="processor", fact=cpu.model)
    yield _cores(cpu)
    if (asked := env.read().threads) > len(cpu.cores):
        yield _too_many(asked, cpu)
    if cpu.quota is not None and cpu.quota < len(cpu.cores):
        whole = cpu.quota >= 1 and cpu.quota == int(cpu.quota)
        yield Finding(
            level=Level.INFO if whole else Level.WARN,
            topic="cpu quota",
            fact=f"{cpu.quota:g} CPUs' worth of time",
            consequence=f"{cpu.threads} thread(s) are used; the engine's own come on top",
            fix="" if whole else "give the container a whole number of CPUs",
        )


def _too_many(asked: int, cpu: Cpu) -> Finding:
    none = asked > len(cpu.usable)
    return Finding(
        level=Level.ERROR if none else Level.WARN,
        topic="threads",
        fact=f"MOET_THREADS={asked}, {len(cpu.cores)} core(s) and {len(cpu.usable)} CPU(s) usable",
        consequence="moet serve refuses it" if none else "threads of one core wait for each other",
        fix="unset MOET_THREADS: moet takes one a core",
    )


def _cores(cpu: Cpu) -> Finding:
    fact = f"{len(cpu.cores)} core(s) usable, {cpu.online} logical CPUs online"
    if len(cpu.cores) > 1:
        return Finding(level=Level.OK, topic="cores", fact=fact)
    return Finding(
        level=Level.WARN,
        topic="cores",
        fact=fact,
        consequence="the engine and the experts share one core",
        fix="widen the affinity (taskset) or the container's cpuset",
    )


def measured(machine: Machine) -> Iterator[Finding]:
    """Each instruction set: the same bits as the reference, and how fast."""
    if not machine.cpu.isa:
        return
    from moet.cli.doctor import measure

    forced = env.read().isa
    if forced and forced not in machine.cpu.isa:
        yield Finding(
            level=Level.ERROR,
            topic="cpu tier",
            fact=f"MOET_ISA={forced}, which this processor does not have",
            consequence="no model can be loaded",
            fix=f"unset MOET_ISA, or take one of {', '.join(machine.cpu.isa)}",
        )
    enough = machine.memory.available >= MEASURE_BYTES
    try:
        load = os.getloadavg()[0]  # before we are a part of it
        best = _best_speeds(machine.cpu) if enough else {}
        for isa in machine.cpu.isa:
            speed, read = best.get(isa, (0.0, 0.0))
            busy = load > BUSY * len(machine.cpu.cores)
            yield _tier(isa, measure.differences(isa), speed, read, busy=busy)
    except MoetError as error:
        fact = f"cannot be run: {error}"
        yield Finding(level=Level.ERROR, topic="cpu tier", fact=fact, fix=error.hint)


def _best_speeds(cpu: Cpu) -> dict[str, tuple[float, float]]:
    """Speed and read bandwidth of the best turn of each instruction set, measured anew while one
    looks slow: another program may have been in the way."""
    from moet.cli.doctor import measure

    turns: list[Speeds] = []

    def best(isa: str) -> tuple[float, float]:
        return max(((t.of[isa], t.read) for t in turns), key=lambda pair: pair[0] / pair[1])

    for _ in range(TURNS):
        turns.append(measure.speeds(cpu))
        found = {isa: best(isa) for isa in cpu.isa}
        if all(speed >= SLOW * read for isa, (speed, read) in found.items() if isa != "portable"):
            break
    return found


def _tier(isa: str, differences: int, speed: float, read: float, *, busy: bool) -> Finding:
    topic = f"tier {isa}"
    if differences:
        return Finding(
            level=Level.ERROR,
            topic=topic,
            fact=f"{differences} outputs differ from the reference",
            consequence="answers would not be the model's",
            fix="please report it with the output of moet doctor --json",
        )
    if not read:
        return Finding(
            level=Level.OK, topic=topic, fact="same bits as the reference; not timed: memory is low"
        )
    share = speed / read
    fact = f"same bits as the reference; {format_rate(speed)} of {format_rate(read)} read bandwidth"
    if share >= SLOW or isa == "portable":
        return Finding(level=Level.OK, topic=topic, fact=fact)
    if busy:
        hint = "the machine is busy, so the figure says little; when it is idle: moet bench cpu"
        return Finding(level=Level.INFO, topic=topic, fact=fact, consequence=hint)
    return Finding(
        level=Level.WARN,
        topic=topic,
        fact=fact,
        consequence=f"{share:.0%} of what the memory can deliver",
        fix="measure again when nothing else runs: moet bench cpu",
    )
