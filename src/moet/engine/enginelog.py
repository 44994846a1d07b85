"""The log file of a server that does not show its engine's log, and what can be learnt from it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import IO

from moet.base import env
from moet.base.errors import EngineError

KEPT = 5
TAIL_BYTES = 256 << 10
VAGUE = "Engine core initialization failed"  # vLLM: the reason is in another process's traceback
LONGEST_LINE = 1000  # characters that are looked at
# The last line of a traceback, plain or behind vLLM's "(EngineCore pid=7) ERROR 12-01 [core.py:9]".
_CAUSE = re.compile(r"(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?([\w.]+(?:Error|Exception)\b(?:: .+)?)")


def create(name: str) -> tuple[Path, IO[bytes]]:
    """A new log file; of the older ones a few are kept.

    Raises:
        EngineError: nothing can be written there.
    """
    folder = env.read().cache_dir.expanduser() / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.glob("serve-*.log"), key=_age)[: -(KEPT - 1) or None]:
            old.unlink(missing_ok=True)
        path = folder / name
        return path, open(path, "wb", opener=_for_this_user)  # it may hold prompts
    except OSError as error:
        hint = "set MOET_CACHE_DIR to a directory that can be written"
        raise EngineError(f"no log can be written in {folder}: {error}", hint=hint) from error


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def is_vague(message: str) -> bool:
    """Whether a failure only says that there is another one."""
    return VAGUE in message


def cause(log: Path | None) -> str:
    """The first error in the end of a log that is not vague itself; empty when there is none."""
    if log is None:
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = (line[:LONGEST_LINE] for line in text.splitlines())
    found = (match for line in lines if (match := _CAUSE.fullmatch(line.rstrip())))
    return next((m[1] for m in found if not is_vague(m[1])), "")
