"""The table of a memory record, for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from moet.base.units import format_bytes, format_seconds
from moet.bench.record import Record

COLUMNS = ("served with", "in the files", "loading", "answering", "peak", "ready in")
SIZES = ("expert", "loading_total", "answering_total", "peak")


def render(record: Record) -> RenderableType:
    """A line for each server, and the limit in words."""
    setup, (limit,) = record.setup, record.rows("limit")
    layers = f"{setup['layers']} layers" if setup["layers"] else "all layers"
    title = f"memory of serving {setup['config']}, {layers}"
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == COLUMNS[0] else "right")
    for row in record.rows("run"):
        sizes = (format_bytes(row[f"{size}_bytes"]) for size in SIZES)
        table.add_row(row["who"], *sizes, format_seconds(row["ready_s"]))
    peak, most = format_bytes(limit["peak_bytes"]), format_bytes(limit["limit_bytes"])
    beyond = format_bytes(limit["beyond_experts_bytes"])
    verdict = "within the limit of" if limit["holds"] else "MORE than the limit of"
    return Group(table, f"peak {peak}, {verdict} {most}; beyond engine and experts {beyond}")
