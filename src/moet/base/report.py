"""A Finding: one fact about the machine or a model, what follows from it, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is. ``ERROR`` stops the main job; ``WARN`` costs speed or safety."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of a doctor's report.

    Attributes:
        topic: a short stable name (``"cpu tier"``), the key in JSON output.
        fact: what was measured or read.
        consequence: what it means for serving; empty when nothing follows.
        fix: what the user can do; empty when there is nothing to do.
    """

    level: Level
    topic: str
    fact: str
    consequence: str = ""
    fix: str = ""
