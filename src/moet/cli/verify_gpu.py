"""``moet verify bits --gpu``: the exams that need a card."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moet.base.errors import UsageError
from moet.cli import card, console

if TYPE_CHECKING:
    from moet.bench.record import Record
    from moet.cli.progress import Share
    from moet.kernels.cpu import Pool
    from moet.kernels.cuda.opened import OpenedCard

KERNELS_SHARE = 0.1
"""Of the outputs, compared with the kernels alone on many more layers."""


def bits(outputs: int, seed: int, *, faults: bool, device: int, json: bool) -> int:
    """Holds the exams and shows the record; exit status 1: something differs."""
    from moet.cli.progress import shares

    if outputs < 1 or seed < 0:
        raise UsageError(f"{outputs} outputs, seed {seed}", hint="outputs from 1, seeds from 0")
    with card.opened(device) as (opened, pool), shares("comparing") as progress:
        setup, rows = _hold(opened, pool, outputs, seed, faults=faults, progress=progress)
    record = _record(setup, rows)
    if json:
        console.write(record.to_json() + "\n")
    else:
        console.out().print(console.facts(facts(record)))
    return 0 if setup["passed"] else 1


def _hold(
    opened: OpenedCard, pool: Pool, outputs: int, seed: int, *, faults: bool, progress: Share
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from moet.verify import faults as fault_exam
    from moet.verify import gpu, hybrid

    variants = card.variants("all", opened, pool)
    room = hybrid.Room(opened.gpu, opened.link, opened.memory, pool)
    kernels = gpu.examine(
        opened.gpu,
        pool,
        outputs=max(1, int(outputs * KERNELS_SHARE)),
        seed=seed,
        progress=lambda case: progress(f"kernels, {case.name}", 0.0),
    )
    split = hybrid.examine(
        room,
        variants,
        outputs=max(1, int(outputs * (1 - KERNELS_SHARE))),
        seed=seed,
        progress=lambda case: progress(f"{case.name}, split {case.splits}", 0.0),
    )
    made = fault_exam.examine(room, variants) if faults else []
    rows = [{"kind": "kernels"} | asdict(case) for case in kernels.cases]
    rows += [{"kind": "hybrid"} | asdict(case) for case in split.cases]
    rows += [{"kind": "fault"} | asdict(fault) for fault in made]
    setup = {
        "card": opened.gpu.card.name,
        "isa": kernels.isa,
        "threads": pool.threads,
        "seed": seed,
        "variants": [str(variant) for variant in variants],
        "outputs": kernels.outputs + split.outputs,
        "differing": kernels.differing + split.differing,
        "passed": kernels.passed and split.passed and not any(fault.wrong for fault in made),
    }
    return setup, rows


def _record(setup: dict[str, Any], rows: list[dict[str, Any]]) -> Record:
    from moet.bench.record import make_record

    return make_record("hybrid-bits", setup, rows)


def facts(record: Record) -> list[tuple[str, str]]:
    """A record for people."""
    lines = [
        (row["name"], f"{row['differing']:,} of {row['outputs']:,} outputs differ")
        for row in record.rows("kernels")
    ]
    for row in record.rows("hybrid"):
        text = (
            f"{row['differing']:,} of {row['outputs']:,} outputs differ, "
            f"{row['splits']} splits, {row['uploads']:,} uploads beside them"
        )
        lines.append((f"{row['name']}, {row['variant']}", text))
    for row in record.rows("fault"):
        verdict = row["wrong"] or row["said"] or "waited for, right"
        lines.append((f"{row['fault']}, {row['variant']}", f"{verdict} ({row['seconds']:.2f} s)"))
    lines += [("first", row["example"]) for row in record.results if row.get("example")][:1]
    setup = record.setup
    total = f"{setup['differing']:,} of {setup['outputs']:,} differ; {setup['card']} beside "
    return [*lines, ("in all", total + f"{setup['threads']} threads, {setup['isa']}")]
