"""Tables of the GPU's bench records, for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from moet.base.units import format_seconds
from moet.bench.record import Record, Row


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _us(value: float) -> str:
    return f"{value:.1f}"


def render_step(record: Record) -> RenderableType:
    """A table a way to wait; all times in microseconds a layer."""
    setup, (reads,) = record.setup, record.rows("read")
    title = (
        f"hidden {setup['hidden']}, intermediate {setup['intermediate']}, "
        f"{setup['experts']} experts, top {setup['top_k']}, {setup['layers']} layers; "
        f"{setup['card']} ({reads['card_read_gb_s']:.0f} GB/s read), "
        f"{record.machine['cpu']['model']}, {setup['threads']} threads"
    )
    variants = dict.fromkeys(row["variant"] for row in record.rows("step"))
    tables = [_variant(record, name) for name in variants]
    return Group(title, *tables, f"(*) extrapolated: {setup['extrapolation']}")


_TIMES = (
    "step", "step_p95", "one_at_a_time", "card", "cpu", "wait", "round_trip", "cpu_in_round_trip",
    "limit",
)  # fmt: skip


def _variant(record: Record, variant: str) -> Table:
    columns = [
        "on card", "tokens", "step us", "p95", "one at a time", "card", "CPU", "wait", "round trip",
        "its CPU", "limit", "ratio", "CPU read", "card read", "40 layers* ms",
    ]  # fmt: skip
    table = _table(f"{variant}: us a layer", columns)
    for row in (row for row in record.rows("step") if row["variant"] == variant):
        table.add_row(
            f"{row['on_card']:.0%}",
            str(row["tokens"]),
            *(_us(row[f"{key}_us"]) for key in _TIMES),
            f"{row['ratio']:.2f}",
            f"{row['cpu_read_share']:.0%}",
            f"{row['card_read_share']:.0%}",
            f"{row['extrapolated_ms']:.1f}",
            style="" if row["holds"] else "red",
        )
    return table


def render_moe(record: Record) -> RenderableType:
    """Steps and launches, then others beside them."""
    tables: list[RenderableType] = [
        _launches(record, name, [r for r in record.rows("gpu") if r["shape"] == name])
        for name in record.setup["shapes"]
    ]
    if rows := record.rows("other"):
        tables.append(_others(rows))
    return Group(*tables)


def _launches(record: Record, name: str, rows: list[Row]) -> Table:
    sizes = ", ".join(f"{key} {size}" for key, size in record.setup["shapes"][name].items())
    title = f"{name}: {sizes}; {record.setup['card']}"
    table = _table(title, ["tokens", "what", "time", "experts", "GB/s", "read GB/s", "ratio"])
    for row in rows:
        table.add_row(
            str(row["tokens"]),
            row["what"],
            format_seconds(row["us"] * 1e-6),
            f"{row['experts']:.1f}",
            f"{row['bytes'] / row['us'] / 1e3:.0f}",
            f"{row['read_gb_s']:.0f}",
            f"{row['ratio']:.2f}" if row["bytes"] else "",
        )
    return table


def _others(rows: list[Row]) -> Table:
    table = _table("others, same card", ["layer", "who", "tokens", "theirs", "moet", "x"])
    for row in rows:
        times = (format_seconds(row[key] * 1e-6) for key in ("us", "moet_us"))
        name, who = row["shape"], row["who"]
        table.add_row(name, who, str(row["tokens"]), *times, f"{row['times_as_fast']:.2f}")
    return table
