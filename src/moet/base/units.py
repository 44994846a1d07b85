"""Bytes and durations, to text and back. Binary units for memory, decimal ones for rates."""

from __future__ import annotations

import math
import re

from moet.base.errors import UsageError

_BINARY = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SHORT = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str) -> int:
    """``"8GiB"``, ``"8G"`` (both 2^33), ``"8GB"`` (8e9) or ``"4096"`` as a number of bytes.

    Raises:
        UsageError: not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    factors = _BINARY | _DECIMAL | _SHORT
    size = float(match[1]) * factors.get(match[2].upper(), math.inf) if match else math.inf
    if not math.isfinite(size):
        raise UsageError(f"{text!r:.80} is not a size", hint="write 8GiB, 512MiB or a byte count")
    return int(size)


def format_bytes(count: float) -> str:
    """A size with three significant digits: ``format_bytes(2**30)`` is ``"1.00 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.3g} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def format_rate(bytes_per_s: float) -> str:
    """A bandwidth in decimal units, as data sheets give it: ``"12.3 GB/s"``."""
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.1f} GB/s"
    return f"{bytes_per_s / 1e6:.0f} MB/s"


def format_seconds(seconds: float) -> str:
    """A duration for people: ``"4.2 us"``, ``"3.1 ms"``, ``"12.0 s"``, ``"2 min 05 s"``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
