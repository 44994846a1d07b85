"""Calls that can be held off: while somebody pauses them none is running and none begins."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from moet.base.errors import MoetError


class Pause:
    """Lets calls through, or a pause; never both. Pauses may overlap, calls too.

    A waiting pause goes before new calls, so it waits for the calls that run and for no others.
    Calls do not nest.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls = 0
        self._pausing: list[int] = []  # threads that pause or want to

    @contextmanager
    def call(self, error: type[MoetError]) -> Iterator[None]:
        """Around a call; waits while somebody pauses.

        Raises:
            MoetError: of class ``error``: this very thread pauses, and would wait for itself.
        """
        with self._changed:
            if threading.get_ident() in self._pausing:
                raise error(
                    "a call that this thread holds off itself",
                    hint="end the pause first: nothing of the kind may be called during a capture",
                )
            self._changed.wait_for(lambda: not self._pausing)
            self._calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, no call runs. Entering waits for those that do."""
        thread = threading.get_ident()
        with self._changed:
            self._pausing.append(thread)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._calls == 0)
            yield
        finally:
            with self._changed:
                self._pausing.remove(thread)
                self._changed.notify_all()
