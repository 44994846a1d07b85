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
        self.hard = hard

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self.count > 0

    def listen(self) -> None:
        """Takes the signals."""
        for number in SIGNALS:
            signal.signal(number, self._take)

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            self.hard()
