"""The benchmark records, and what documents say with them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks/records"

Row = dict[str, Any]

RANGES = {
    "addition": "addition, two numbers of up to 3 digits",
    "subtraction": "subtraction, up to 3 digits, never below zero",
    "multiplication": "multiplication, one digit by one or two, and up to 12 x 12",
    "recall": "recall, a value out of a list in the question",
    "json": "json, a small object, a list or a tool call",
}
"""What the demo is trained on (`moet.demo.tasks`), by the names of the record."""


def record(name: str) -> Row:
    """A record by its file's name."""
    loaded: Row = json.loads((RECORDS / f"{name}.json").read_text())
    return loaded


def measured(name: str) -> bool:
    """Whether there is a record of that name."""
    return (RECORDS / f"{name}.json").exists()


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A markdown table; numbers to the right."""
    names = list(head)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def gigabytes(count: int) -> str:
    """Decimal, two places."""
    return f"{count / 1e9:.2f} GB"
