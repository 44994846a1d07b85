"""When is an engine dead? When it has work and nothing of it moves. Pure: no clock, no process."""

from __future__ import annotations


class Watchdog:
    """Adds up the time in which there was work and no progress.

    Only progress sets the sum back. Work that goes away does not: a client that gave up on a stuck
    engine proves nothing, and many of them one after the other would hide it for ever.

    Time that nobody watched does not count: when the watcher itself stood still (a suspended
    laptop, a paused container), everything else stood still too.

    Args:
        limit: seconds without progress after which the engine is dead.
        longest_turn: the most that one observation can add, seconds.
    """

    def __init__(self, limit: float, longest_turn: float = 1.0) -> None:
        self.limit = limit
        self.longest_turn = longest_turn
        self.stood_still = 0.0
        self._last: float | None = None
        self._progress: object = None

    def observe(self, now: float, *, busy: bool, progress: object) -> bool:
        """One look. True once the engine is dead.

        Args:
            now: seconds, of a clock that never goes back.
            busy: whether the engine has work.
            progress: anything that changes when the engine gets on.
        """
        turn = 0.0 if self._last is None else min(now - self._last, self.longest_turn)
        moved = progress != self._progress
        self._last, self._progress = now, progress
        if moved:
            self.stood_still = 0.0
        elif busy:
            self.stood_still += turn
        return self.stood_still >= self.limit
