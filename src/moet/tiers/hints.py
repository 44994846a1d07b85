"""Records that may be wanted soon, the likeliest first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain


class Hints:
    """What is expected, the newest first, and behind it what a start warms up with. Its user guards
    it."""

    def __init__(self) -> None:
        self._expected: dict[int, None] = {}
        self._warming: dict[int, None] = {}

    def expect(self, records: list[int]) -> None:
        """These go before all others."""
        self._expected = dict.fromkeys([*records, *self._expected])

    def warm(self, records: Iterable[int]) -> None:
        """These come when nothing else is expected."""
        self._warming = dict.fromkeys(records)

    def __iter__(self) -> Iterator[int]:
        return chain(self._expected, self._warming)

    def drop(self, records: Iterable[int]) -> None:
        """These are not expected any more."""
        for record in records:
            self._expected.pop(record, None)
            self._warming.pop(record, None)

    def clear(self) -> None:
        """Nothing is expected."""
        self._expected.clear()
        self._warming.clear()
