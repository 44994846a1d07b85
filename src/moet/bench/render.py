"""Tables of a CPU bench record, for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from moet.base.units import format_seconds
from moet.bench.record import Record, Row


def render(record: Record) -> RenderableType:
    """The record's tables: speed, beside busy processes, peers; those that it has."""
    tables: list[RenderableType] = [_speed(record)]
    if rows := record.rows("busy"):
        tables.append(_busy(rows))
    if rows := record.rows("peer"):
        tables.append(_peers(rows))
    return Group(*tables)


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "who" else "right")
    return table


def _speed(record: Record) -> Table:
    shape = record.setup["shape"]
    title = (
        f"one MoE layer: hidden {shape['hidden']}, intermediate {shape['intermediate']}, "
        f"{shape['experts']} experts, top {shape['top_k']}, MXFP4; "
        f"{record.machine['cpu']['model']}, {record.setup['isa']}"
    )
    columns = [
        "threads",
        "tokens",
        "who",
        "a step",
        "GB/s",
        "read GB/s",
        "ratio",
        "samples",
        "quiet",
    ]
    table = _table(title, columns)
    for row in record.rows("speed"):
        table.add_row(
            str(row["threads"]),
            str(row["tokens"]),
            row["who"],
            format_seconds(row["us"] * 1e-6),
            f"{row['gb_s']:.1f}",
            f"{row['read_gb_s']:.1f}",
            f"{row['ratio']:.2f}",
            str(row["samples"]),
            str(row["quiet"]),
        )
    return table


def _busy(rows: list[Row]) -> Table:
    title = f"one token beside {rows[0]['processes']} busy processes, {rows[0]['steps']} steps"
    columns = ["threads", "who", "alone", "p95", "busy", "p95", "median x", "p95 x"]
    table = _table(title, columns)
    for row in rows:
        times = [row[f"{n}_{s}_us"] for n in ("alone", "busy") for s in ("median", "p95")]
        table.add_row(
            str(row["threads"]),
            row["who"],
            *(format_seconds(t * 1e-6) for t in times),
            f"{row['median_slowdown']:.1f}",
            f"{row['p95_slowdown']:.1f}",
        )
    return table


def _peers(rows: list[Row]) -> Table:
    table = _table(
        "peers: output against fp32 on the same weights", ["threads", "who", "error", ""]
    )
    for row in rows:
        verdict = "same layer" if row["same_layer"] else "NOT the same layer"
        who = f"{row['who']} {row['version']}"
        table.add_row(str(row["threads"]), who, f"{row['relative_error']:.1e}", verdict)
    return table
