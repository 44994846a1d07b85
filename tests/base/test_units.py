"""Sizes and durations."""

from __future__ import annotations

import pytest

from moet.base.errors import UsageError
from moet.base.units import format_bytes, format_rate, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("8GiB", 2**33), ("8g", 2**33), ("1.5 MiB", 3 * 2**19), ("8GB", 8 * 10**9)],
)
def test_parse_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "8 parsecs", "-1", "1e9", "8GiBs", "9" * 400])
def test_not_a_size(text: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        parse_bytes(text)


def test_formats() -> None:
    assert [format_bytes(n) for n in (12, 2**30, 3 * 2**41)] == ["12 B", "1.00 GiB", "6.00 TiB"]
    assert [format_rate(r) for r in (12.34e9, 3e8)] == ["12.3 GB/s", "300 MB/s"]
    assert [format_seconds(s) for s in (4.2e-6, 3.1e-3, 12, 125)] == [
        "4.2 us",
        "3.1 ms",
        "12.0 s",
        "2 min 05 s",
    ]
