"""One error class a family. Each carries a ``hint``: what the user can do about it."""

from __future__ import annotations


class MoetError(Exception):
    """Base of every error that moet raises on purpose.

    Args:
        message: what is wrong, with the names and the numbers.
        hint: what the user can do; shown as a ``hint:`` line, in tracebacks too. May be empty.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")


class UsageError(MoetError):
    """The command line or a setting is wrong."""


class FormatError(MoetError):
    """Bytes that are not what their format says (a reserved scale byte, a wrong tile size)."""


class CheckpointError(MoetError):
    """A checkpoint that is missing, truncated, inconsistent or of an unknown family."""


class PackError(MoetError):
    """A pack that is missing, unfinished, damaged or of another checkpoint, or not writable."""


class MachineError(MoetError):
    """The machine lacks something: memory, an instruction set, a limit that is too low."""


class TierError(MoetError):
    """A storage tier was asked for something that it cannot do (no space, no such expert)."""


class KernelError(MoetError):
    """A kernel was asked for a shape, a format or an instruction set that it does not have."""


class CopyError(KernelError):
    """A copy may be under way for which nobody can wait: neither its source nor its target may be
    used again."""


class StepError(MoetError):
    """A step could not be finished: its output must not be used."""


class EngineError(MoetError):
    """The engine (vLLM) and moet do not fit together, or the engine has failed."""


class UnsupportedError(EngineError):
    """A combination that moet refuses by name instead of half-running it."""
