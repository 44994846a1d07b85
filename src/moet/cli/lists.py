"""Lists on the command line: ``a,b,c``."""

from __future__ import annotations

from collections.abc import Iterable

from moet.base.errors import UsageError


def words(flag: str, text: str, hint: str) -> tuple[str, ...]:
    """The parts of a list, without blanks around them.

    Args:
        flag: for the message.
        text: what was typed.
        hint: an example.

    Raises:
        UsageError: there is none, one is empty, or one is there twice.
    """
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise UsageError(f"{flag} {text!r} has an empty entry", hint=hint)
    twice(flag, parts, hint)
    return parts


def numbers(flag: str, text: str, hint: str) -> tuple[int, ...]:
    """The numbers of a list, from 0 up. Raises UsageError as ``words``, and for anything else."""
    parts = words(flag, text, hint)
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise UsageError(f"{flag} {text!r} is not a list of numbers", hint=hint)
    values = tuple(map(int, parts))
    twice(flag, values, hint)
    return values


def twice(flag: str, values: Iterable[object], hint: str) -> None:
    """Raises UsageError where a value is there twice."""
    seen = set()
    for value in values:
        if value in seen:
            raise UsageError(f"{flag} names {value} twice", hint=hint)
        seen.add(value)
