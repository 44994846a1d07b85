"""What an unfinished pack has already: the plan, then a line a record that is on the disk.

A line is ``<index> <checksum> <xxh32 of the line so far>``. Lines are added only after the records
they tell of were synced, so a crash loses lines and never leaves one that promises too much. A line
that was torn ends the journal. A resumed run hashes the records all the same
(docs/decisions/pack.md).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from moet.pack.blockfile import replace_file
from moet.pack.faults import BrokenPack, PackFault, unwritable
from moet.pack.spec import Plan, parse_head, read_small

JOURNAL = "journal"
_LINE = re.compile(rb"((?:0|[1-9][0-9]{0,12}) ([0-9a-f]{16})) ([0-9a-f]{8})")


def _line(index: int, checksum: int) -> bytes:
    text = b"%d %016x" % (index, checksum)
    return b"%b %08x\n" % (text, xxhash.xxh32_intdigest(text))


def _head(plan: Plan) -> bytes:
    return json.dumps(plan.head(), separators=(",", ":")).encode() + b"\n"


def _parse_lines(raw: bytes, start: int) -> tuple[dict[int, int], int]:
    """(index -> checksum, where the last good line ends); the last of several lines counts."""
    records: dict[int, int] = {}
    while (end := raw.find(b"\n", start)) >= 0:
        match = _LINE.fullmatch(raw, start, end)
        if not match or b"%08x" % xxhash.xxh32_intdigest(match[1]) != match[3]:
            break
        records[int(match[1].split()[0])] = int(match[2], 16)
        start = end + 1
    return records, start


def parse_journal(raw: bytes, path: Path) -> tuple[Plan, dict[int, int], int]:
    """(plan, index -> checksum, where the last good line ends) of a journal's bytes.

    Raises:
        BrokenPack: BAD_JOURNAL.
    """
    head, newline, _ = raw.partition(b"\n")
    if not newline:
        raise BrokenPack(PackFault.BAD_JOURNAL, path, "it has no first line")
    try:
        plan = parse_head(head, path)
    except BrokenPack as error:
        raise BrokenPack(PackFault.BAD_JOURNAL, path, f"its first line is odd: {error}") from error
    records, end = _parse_lines(raw, len(head) + 1)
    return plan, {i: checksum for i, checksum in records.items() if i < plan.records}, end


def _read(path: Path) -> tuple[Plan, dict[int, int], int]:
    return parse_journal(read_small(path), path)


def read_journal(folder: Path) -> tuple[Plan, dict[int, int]]:
    """The plan of an unfinished pack and its records, index -> checksum.

    Raises:
        BrokenPack: UNREADABLE, TOO_LARGE or BAD_JOURNAL.
    """
    plan, records, _ = _read(folder / JOURNAL)
    return plan, records


class Journal:
    """The journal of a pack that is being written.

    Args:
        folder: of the pack.
        plan: what is being written.

    Attributes:
        records: index -> checksum of the records that an earlier run has written.

    Raises:
        BrokenPack: FOREIGN, it is the journal of something else; BAD_JOURNAL; or it cannot be
            read or written.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._path = folder / JOURNAL
        if not self._path.exists():
            replace_file(self._path, _head(plan))
        before, self.records, end = _read(self._path)
        if (odd := _other(before.head(), plan.head())) is not None:
            what = f"the unfinished pack that is there has {odd}"
            hint = "finish it as it was begun, or remove it: moet pack rm FOLDER"
            raise BrokenPack(PackFault.FOREIGN, folder, what, hint=hint)
        self._fd = self._open(end)

    def _open(self, end: int) -> int:
        """Ready to add lines behind the last good one."""
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.ftruncate(fd, end)
        except OSError as error:
            raise unwritable(self._path, error) from error
        return fd

    def add(self, records: Iterable[tuple[int, int]]) -> None:
        """Adds (index, checksum) of records that are on the disk; returns when the lines are too.

        Raises:
            BrokenPack: NO_SPACE or WRITE_FAILED.
        """
        data = b"".join(_line(*record) for record in records)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            os.fdatasync(self._fd)
        except OSError as error:
            raise unwritable(self._path, error) from error

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)


def _other(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The first field in which two plans differ; where the checkpoint lay does not count."""
    names = {"files": "other folders", "checkpoint": "another state of the checkpoint"}
    for key, value in now.items():
        if key != "source" and before[key] != value:
            return names.get(key, f"another {key}")
    return None
