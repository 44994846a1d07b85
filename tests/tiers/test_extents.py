"""The arena's bookkeeping against a plain map of bytes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from moet.tiers.extents import Extents

UNIT = 16


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 5 * UNIT)), max_size=60), st.integers(1, 20)
)
def test_no_byte_has_two_owners_and_none_is_lost(steps: list[tuple[bool, int]], units: int) -> None:
    extents = Extents(units * UNIT, UNIT)
    owned: dict[int, int] = {}
    for take, size in steps:
        if take or not owned:
            offset = extents.take(size)
            if offset is None:
                assert extents.largest < extents.rounded(size)
                continue
            assert offset % UNIT == 0
            owned[offset] = size
        else:
            offset = sorted(owned)[size % len(owned)]
            extents.give(offset, owned.pop(offset))
        spans = sorted((o, o + extents.rounded(s)) for o, s in owned.items())
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert not spans or spans[-1][1] <= extents.capacity
        assert extents.free_bytes == extents.capacity - sum(b - a for a, b in spans)
        assert extents.largest == _largest_gap(spans, extents.capacity)


def _largest_gap(spans: list[tuple[int, int]], capacity: int) -> int:
    edges = [0, *(edge for span in spans for edge in span), capacity]
    return max(b - a for a, b in zip(edges[::2], edges[1::2], strict=True))


def test_first_fit_takes_the_lowest_hole() -> None:
    extents = Extents(4 * UNIT, UNIT)
    offsets = [extents.take(UNIT) for _ in range(4)]
    assert offsets == [0, UNIT, 2 * UNIT, 3 * UNIT]
    extents.give(UNIT, UNIT)
    extents.give(3 * UNIT, UNIT)
    assert extents.take(1) == UNIT
