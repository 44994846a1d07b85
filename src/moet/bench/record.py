"""What a bench leaves: numbers, the machine, the version, the moment. Documents render these."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import moet
from moet.base import jsontext
from moet.base.errors import UsageError
from moet.machine.snapshot import read_machine
from moet.machine.versions import version_of

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One run of one bench.

    Attributes:
        bench: its name, for example ``"cpu"``.
        moet: version of the package.
        commit: commit of the source tree, with ``+`` where it had local changes; empty for an
            installed package.
        timestamp: when it ended, UTC, ISO 8601.
        machine: `moet.machine.snapshot.Machine` as JSON has it.
        setup: what was asked for.
        results: the numbers, one flat row each; units are in the keys.
    """

    bench: str
    moet: str
    commit: str
    timestamp: str
    machine: dict[str, Any]
    setup: dict[str, Any]
    results: list[Row]

    def to_json(self) -> str:
        """The record as one JSON object; what is not finite (no sample, say) is null."""
        return jsontext.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Record:
        """A record from what `to_json` wrote.

        Raises:
            UsageError: not such a record.
        """
        try:
            raw = json.loads(text)
            names = {field.name for field in fields(cls)}
            if set(raw) != names:
                raise ValueError(f"fields {sorted(set(raw) ^ names)} differ")
            return cls(**raw)
        except (ValueError, TypeError) as error:
            hint = "pass a file that `moet bench ... --json` has written"
            raise UsageError(f"not a bench record: {error}", hint=hint) from error

    def rows(self, kind: str) -> list[Row]:
        """The results of one kind."""
        return [row for row in self.results if row["kind"] == kind]


def make_record(bench: str, setup: dict[str, Any], results: list[Row]) -> Record:
    """A record of now, of this machine and this moet."""
    return Record(
        bench=bench,
        moet=version_of("moet") or "unknown",
        commit=source_commit(Path(moet.__file__).parent),
        timestamp=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=asdict(read_machine()),
        setup=setup,
        results=results,
    )


def source_commit(folder: Path) -> str:
    """Short commit of the checkout that holds a folder; empty where it is not in one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=30
        ).stdout.strip()

    try:
        tracked = git("ls-files", "__init__.py")
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "") if tracked else ""
    except (OSError, subprocess.SubprocessError):
        return ""
