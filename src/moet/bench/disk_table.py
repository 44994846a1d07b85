"""The table of a disk record, for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from moet.base.units import format_bytes, format_seconds
from moet.bench.record import Record, Row

COLUMNS = ("read by", "in flight", "GB/s", "turns", "x in order", "a record", "p95", "CPU s/GB")


def render(record: Record) -> RenderableType:
    """A line for each way and depth under that of reading in order; what checksums cost."""
    setup, (in_order,), (checksum,) = (
        record.setup,
        record.rows("sequential"),
        record.rows("checksum"),
    )
    past = "past the page cache" if setup["direct"] else "through the page cache"
    title = (
        f"records of {format_bytes(setup['record_bytes'])}, {setup['filesystem']}, {past}, "
        f"{setup['queue_depth']} pieces of {format_bytes(setup['piece'])} at the disk"
    )
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == COLUMNS[0] else "right")
    first = ["in order", "1", f"{in_order['gb_s']:.2f}", _turns(in_order), "1.00"]
    table.add_row(*first, "", "", "")
    for row in [*record.rows("read"), *record.rows("tier")]:
        table.add_row(*_cells(row))
    kept = f"{checksum['read_rate_kept']:.3f}"
    words = (
        f"xxh3-64: {checksum['gb_s']:.1f} GB/s a thread; with checksums {kept} of the rate without"
    )
    return Group(table, words)


def _cells(row: Row) -> list[str]:
    return [
        row["who"],
        str(row["depth"]),
        f"{row['gb_s']:.2f}",
        _turns(row),
        f"{row['of_sequential']:.2f}",
        format_seconds(row["median_ms"] * 1e-3),
        format_seconds(row["p95_ms"] * 1e-3),
        f"{row['cpu_s_per_gb']:.3f}",
    ]


def _turns(row: Row) -> str:
    return f"{row['gb_s_min']:.2f}-{row['gb_s_max']:.2f}"
