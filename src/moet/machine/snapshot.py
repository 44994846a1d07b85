"""One frozen snapshot of the machine, to and from JSON. Planners and reports take it, not /proc."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from moet.base.errors import MachineError
from moet.machine.cpu import Cpu, read_cpu
from moet.machine.memory import Memory, read_memory
from moet.machine.versions import read_versions

T = TypeVar("T", Cpu, Memory)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What moet knows about the machine that it runs on."""

    cpu: Cpu
    memory: Memory
    versions: dict[str, str]

    def to_json(self) -> str:
        """The snapshot as one JSON object, keys as the fields are named."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """A snapshot from what ``to_json`` wrote, here or on another machine.

        Raises:
            MachineError: not JSON, a field is missing, or there is one too many.
        """
        try:
            raw = json.loads(text)
            return cls(
                cpu=_build(Cpu, raw["cpu"]),
                memory=_build(Memory, raw["memory"]),
                versions={str(k): str(v) for k, v in raw["versions"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            hint = "write it with this version of moet: moet doctor --json"
            raise MachineError(f"not a machine snapshot: {error}", hint=hint) from error


def _build(kind: type[T], raw: dict[str, Any]) -> T:
    """A dataclass from a JSON object; lists become the tuples that they were."""
    names = {field.name for field in fields(kind)}
    if set(raw) != names:
        raise ValueError(f"fields of {kind.__name__}: {sorted(set(raw) ^ names)} differ")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
    return kind(**values)


def read_machine(root: Path = Path("/")) -> Machine:
    """Looks at the machine. ``root`` is where /proc, /sys and /dev are found.

    Raises:
        MachineError: the kernel's files are not there (not Linux, or /proc is not mounted).
    """
    return Machine(cpu=read_cpu(root), memory=read_memory(root), versions=read_versions())
