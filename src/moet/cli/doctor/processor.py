"""Findings about the processor: what it has, and what the kernels do on it, measured."""

from __future__ import annotations

from collections.abc import Iterator

from moet.base import env
from moet.base.errors import MoetError
from moet.base.report import Finding, Level
from moet.base.units import format_rate
from moet.machine import Cpu, Machine

MEASURE_BYTES = 2 << 30  # free memory below which nothing is timed
SLOW = 0.5  # of the read bandwidth: below it, something is wrong


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
        speeds = measure.speeds(machine.cpu) if enough else None
        for isa in machine.cpu.isa:
            speed = speeds.of[isa] if speeds else 0.0
            yield _tier(isa, measure.differences(isa), speed, speeds.read if speeds else 0.0)
    except MoetError as error:
        fact = f"cannot be run: {error}"
        yield Finding(level=Level.ERROR, topic="cpu tier", fact=fact, fix=error.hint)


def _tier(isa: str, differences: int, speed: float, read: float) -> Finding:
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
    return Finding(
        level=Level.WARN,
        topic=topic,
        fact=fact,
        consequence=f"{share:.0%} of what the memory can deliver",
        fix="measure again when nothing else runs: moet bench cpu",
    )
