"""Signals of a command that owns a server: the first asks it to end, the second does not ask."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopper:
    """Remembers that the end is wanted. A handler that raised could tear a clean-up apart.

    Args:
        hard: what the second signal does; it runs in the signal handler.
    """

    def __init__(self, hard: Callable[[], object] = lambda: None) -> None:
        self.count = 0
        self.typed = False  # a ctrl-C: the terminal shows ^C
        self.hard = hard

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self.count > 0

    def listen(self) -> None:
        """Takes the signals."""
        for number in SIGNALS:
            signal.signal(number, self._take)

    def leave(self) -> None:
        """Gives ctrl-C back to Python; the other signals unwind the program, once.

        For a command that works with a server of its own: leaving its block ends the server.
        """
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in SIGNALS[1:]:
            signal.signal(number, self._unwind)

    def _unwind(self, number: int, _frame: FrameType | None) -> None:
        self.listen()  # nothing may tear the clean-up apart that follows
        raise SystemExit(128 + number)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.typed |= number == signal.SIGINT
        if self.count > 1:
            self.hard()
