"""Which experts get slots: the hottest, always the same ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet.base.errors import UsageError
from moet.hybrid.split import choose


def test_the_hottest_get_the_slots_and_of_equals_the_lowest_id() -> None:
    heat = {0: (5, 9, 5, 0), 3: (0, 0, 0, 0)}
    assert choose(heat, {0: 3, 3: 2}, 4) == {0: (1, 0, 2), 3: (0, 1)}


def test_without_heat_all_count_the_same() -> None:
    assert choose(None, {2: 3, 5: 0}, 8) == {2: (0, 1, 2), 5: ()}


def test_layers_may_have_different_numbers_of_slots() -> None:
    heat = {0: (1, 2), 1: (2, 1), 2: (0, 7)}
    assert choose(heat, {0: 0, 1: 2, 2: 1}, 2) == {0: (), 1: (0, 1), 2: (1,)}


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.data())
def test_nobody_outside_is_hotter_than_anybody_inside(
    counts: list[int], data: st.DataObject
) -> None:
    wanted = data.draw(st.integers(0, len(counts)))
    chosen = choose({0: counts}, {0: wanted}, len(counts))[0]
    assert len(set(chosen)) == wanted
    inside = [(counts[e], -e) for e in chosen]
    outside = [(counts[e], -e) for e in range(len(counts)) if e not in chosen]
    assert inside == sorted(inside, reverse=True)
    assert not inside or not outside or min(inside) > max(outside)


@pytest.mark.parametrize("slots", [-1, 5])
def test_impossible_numbers_of_slots_are_named(slots: int) -> None:
    with pytest.raises(UsageError, match=f"{slots} slots for the 4 experts of layer 7") as caught:
        choose(None, {7: slots}, 4)
    assert caught.value.hint


@pytest.mark.parametrize("heat", [{}, {0: (1, 2, 3)}])
def test_heat_of_another_shape_is_named(heat: dict[int, tuple[int, ...]]) -> None:
    with pytest.raises(UsageError, match=r"layer 0 has \d counts for 4 experts"):
        choose(heat, {0: 1}, 4)
