"""Strict reads of a manifest's JSON objects: what is missing, odd or too much is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from moet.pack.faults import BrokenPack, PackFault

_HASH = re.compile(r"[0-9a-f]{16}")
MOST_SIZE = 1 << 24  # of any dimension; bounds every product of two
_MOST_ENTRIES = 1 << 16  # files of a checkpoint, layers of a model


class Fields:
    """One object of a manifest.

    Args:
        value: the object.
        path: the file, for the messages.
        name: of the object within the file.

    Raises:
        BrokenPack: BAD_FIELD, it is no object.
    """

    def __init__(self, value: Any, path: Path, name: str = "") -> None:
        self.path = path
        self.name = name
        if not isinstance(value, dict):
            what = f"{name or 'it'} is not an object"
            raise BrokenPack(PackFault.BAD_FIELD, path, what)
        self._values: dict[str, Any] = value

    def wrong(self, key: str, why: str) -> BrokenPack:
        """The error for a field; ``why`` completes "it is ..."."""
        value = str(self._values.get(key))
        what = f"{self._full(key)} is {why}: {value!r:.60}"
        return BrokenPack(PackFault.BAD_FIELD, self.path, what)

    def _full(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def only(self, *keys: str) -> None:
        """Refuses an object with other fields than these, or without one of them."""
        odd = sorted(set(keys) ^ self._values.keys())
        if odd:
            said = "missing" if odd[0] in keys else "not a field that is known"
            raise BrokenPack(
                PackFault.BAD_FIELD, self.path, f"{self._full(odd[0])!r:.80} is {said}"
            )

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            raise BrokenPack(PackFault.BAD_FIELD, self.path, f"{self._full(key)} is missing")
        return self._values[key]

    def text(self, key: str) -> str:
        """A string."""
        value = self[key]
        if not isinstance(value, str) or len(value) > 4096 or "\0" in value:
            raise self.wrong(key, "not a text")
        return value

    def count(self, key: str) -> int:
        """A whole number, 0 .. 2^63 - 1."""
        value = self[key]
        if not _is_count(value):
            raise self.wrong(key, "not a whole number from 0 up")
        return int(value)

    def integer(self, key: str) -> int:
        """A whole number of 64 bits, negative ones too."""
        value = self[key]
        if type(value) is not int or abs(value) >= 2**63:
            raise self.wrong(key, "not a whole number")
        return value

    def size(self, key: str) -> int:
        """A dimension of a model: 1 .. 2^24."""
        value = self[key]
        if not _is_count(value) or not 0 < value <= MOST_SIZE:
            raise self.wrong(key, "not a dimension of a model")
        return int(value)

    def counts(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self._list(key)
        if not all(map(_is_count, value)):
            raise self.wrong(key, "not a list of whole numbers")
        return tuple(value)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self[key]
        if not isinstance(value, bool):
            raise self.wrong(key, "neither true nor false")
        return value

    def hash(self, key: str) -> int:
        """16 hexadecimal digits."""
        return self._hash(key, self[key])

    def hashes(self, key: str) -> list[int]:
        """A list of them."""
        value = self[key]
        if not isinstance(value, list):
            raise self.wrong(key, "not a list")
        return [self._hash(key, entry) for entry in value]

    def _hash(self, key: str, value: Any) -> int:
        if not isinstance(value, str) or not _HASH.fullmatch(value):
            raise self.wrong(key, "not 16 hexadecimal digits")
        return int(value, 16)

    def object(self, key: str) -> Fields:
        """An object."""
        return Fields(self[key], self.path, self._full(key))

    def objects(self, key: str) -> list[Fields]:
        """A list of objects, at least one."""
        rows = enumerate(self._list(key))
        return [Fields(row, self.path, f"{self._full(key)}[{i}]") for i, row in rows]

    def _list(self, key: str) -> list[Any]:
        value = self[key]
        if not isinstance(value, list) or not 0 < len(value) <= _MOST_ENTRIES:
            raise self.wrong(key, "not a list of one or more")
        return value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
