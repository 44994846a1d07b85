"""The only reader of ``os.environ``. Unknown ``MOET_*`` names are refused: no silent typos."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from moet.base.errors import UsageError

PREFIX = "MOET_"
PROGRAM = "MOET_PROGRAM"
MAILBOXES = ("auto", "poll", "memop", "hostfunc")
IO_MODES = ("auto", "uring", "threads")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be set from the environment, ``MOET_`` + the upper-case field name.

    Attributes:
        isa: force one CPU vocabulary: ``portable``, ``avx2`` or ``avx512vnni``; empty = the best
            that the machine has. Forcing an absent one is an error.
        threads: threads of the CPU tier, the calling one included; 0 = one a usable core.
        cache_dir: where logs of servers, compiled code and packs are kept.
        stall_seconds: a step with work in flight that makes no progress for so long is dead.
        mailbox: how a card waits for the CPU: ``poll``, ``memop`` or ``hostfunc``; ``auto`` = the
            first that works, found out at start-up. Forcing one that does not work is an error.
        api_key: the key that ``moet serve`` asks its clients for and that ``moet chat`` sends.
        io: how experts are read from disks: ``auto``, ``uring`` or ``threads``. ``auto`` tries
            io_uring out and takes threads where it is forbidden; a forced one that cannot be is
            an error.
        heartbeat: the heartbeat page of the server that started this process; set by ``moet
            serve`` for its children, empty elsewhere.
        program: what the user calls this program, for hints; set by a clone's script ``./moet``.
    """

    isa: str = ""
    threads: int = 0
    cache_dir: Path = Path("~/.cache/moet")
    stall_seconds: float = 120.0
    mailbox: str = "auto"
    api_key: str = ""
    io: str = "auto"
    heartbeat: str = ""
    program: str = "moet"


def _parse(name: str, kind: object, text: str) -> object:
    parsers = {"str": str, "int": int, "float": float, "Path": Path}
    try:
        return parsers[str(kind)](text)
    except ValueError as error:
        hint = f"{name} takes a value of type {kind}"
        raise UsageError(f"{name}={text!r} cannot be read", hint=hint) from error


def read(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of this process.

    Raises:
        UsageError: an unknown ``MOET_*`` name, or a value that cannot be read.
    """
    environ = os.environ if environ is None else environ
    known = {PREFIX + f.name.upper(): f for f in fields(Settings)}
    given = {k: v for k, v in environ.items() if k.startswith(PREFIX)}
    unknown = sorted(set(given) - set(known))
    if unknown:
        names = ", ".join(sorted(known))
        raise UsageError(f"unknown setting {unknown[0]}", hint=f"the settings are {names}")
    values = {known[k].name: _parse(k, known[k].type, v) for k, v in given.items()}
    settings = Settings(**values)  # type: ignore[arg-type]
    if settings.threads < 0:
        raise UsageError(f"MOET_THREADS={settings.threads} is negative", hint="0 means all cores")
    if not settings.stall_seconds > 0:
        hint = "give the seconds after which a silent engine is dead, for example 120"
        raise UsageError(f"MOET_STALL_SECONDS={settings.stall_seconds} is not positive", hint=hint)
    if settings.io not in IO_MODES:
        raise UsageError(f"MOET_IO={settings.io!r} is no way to read", hint=" or ".join(IO_MODES))
    if settings.mailbox not in MAILBOXES:
        hint = f"one of {', '.join(MAILBOXES)}"
        raise UsageError(f"MOET_MAILBOX={settings.mailbox!r} is no way to wait", hint=hint)
    if given.get("MOET_CACHE_DIR") == "":
        raise UsageError("MOET_CACHE_DIR is empty", hint="name a directory, or unset it")
    expand_user(settings.cache_dir)
    require_key(settings.api_key, "MOET_API_KEY")
    return settings


def expand_user(path: Path) -> Path:
    """``path`` with its ``~`` replaced. Raises UsageError where that names no user."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise UsageError(f"{path}: {error}", hint="write the path out") from error


def require_key(key: str, name: str) -> None:
    """Raises UsageError for a key that no HTTP header can carry; the key itself is not shown."""
    if not all("!" <= char <= "~" for char in key):
        hint = "take a key of ASCII letters, digits and signs, without blanks"
        raise UsageError(f"{name} has characters that an HTTP header cannot carry", hint=hint)


def program() -> str:
    """What the user calls this program; read alone, for a wrong setting is told by that name."""
    return os.environ.get(PROGRAM) or "moet"


def runtime_dir() -> Path | None:
    """The per-user directory for sockets and pid files that the login manager made, if any."""
    text = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(text) if text and os.access(text, os.W_OK) else None


def child_environ(**extra: str) -> dict[str, str]:
    """A copy of the environment for a child process, with ``extra`` on top."""
    return {**os.environ, **extra}


def with_defaults(environ: dict[str, str], **defaults: str) -> dict[str, str]:
    """``environ`` with ``defaults`` for the names that it does not set."""
    return {**defaults, **environ}
