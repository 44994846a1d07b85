"""The table of a replay's record, for people."""

from __future__ import annotations

import math

from rich.console import RenderableType
from rich.table import Table

from moet.base.units import format_bytes, format_rate, format_seconds
from moet.bench.record import Record

COLUMNS = (
    "memory",
    "policy",
    "hits",
    "read a step",
    "stall a step",
    "p95",
    "prefill hits",
    "stall",
)


def render(record: Record) -> RenderableType:
    """Budgets and policies: what decode finds in memory, what it reads and waits for."""
    setup = record.setup
    title = (
        f"{setup['layers']} layers of {setup['experts']} experts, top {setup['top_k']}, "
        f"{format_bytes(setup['record_bytes'])} each; {setup['steps'] - setup['skipped']} steps "
        f"after {setup['skipped']}; a disk of {format_rate(setup['bandwidth'])}"
    )
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "policy" else "right")
    before = None
    for row in record.rows("policy"):
        if before not in {None, row["budget"]}:
            table.add_section()
        before = row["budget"]
        table.add_row(
            f"{100 * row['budget']:.3g} %",
            row["policy"],
            _share(row["hit_rate"]),
            _if(format_bytes, row["bytes_a_step"]),
            _if(format_seconds, row["stall_s"]),
            _if(format_seconds, row["stall_p95_s"]),
            _share(row["prefill_hit_rate"]),
            _if(format_seconds, row["prefill_stall_s"]),
        )
    return table


def render_disk(record: Record) -> RenderableType:
    """As ``render``, of a replay through memory and a disk."""
    setup = record.setup
    title = (
        f"{setup['layers']} layers of {setup['experts']} experts, top {setup['top_k']}, "
        f"{format_bytes(setup['record_bytes'])} each, read for real; "
        f"{setup['steps'] - setup['skipped']} steps after {setup['skipped']}; prefills included"
    )
    table = Table(title=title, title_justify="left")
    for column in ("memory", "policy", "hits", "read", "rate", "stall a step", "p95", "failed"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in record.rows("policy"):
        table.add_row(
            f"{100 * row['budget']:.3g} %",
            row["policy"],
            _share(row["all_hit_rate"]),
            format_bytes(row["read_bytes"]),
            format_rate(row["read_rate"]),
            _if(format_seconds, row["stall_s"]),
            _if(format_seconds, row["stall_p95_s"]),
            str(row["failures"]),
        )
    return table


def _share(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{100 * value:.1f} %"


def _if(how: object, value: float | None) -> str:
    assert callable(how)
    return "" if value is None or math.isnan(value) else str(how(value))
