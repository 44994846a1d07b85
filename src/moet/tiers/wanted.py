"""One call's experts on their way: groups of leases as they become readable, and what failed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moet.base.errors import MoetError
from moet.tiers.api import ExpertKey, Lease

if TYPE_CHECKING:
    from moet.tiers.cascade import Cascade


class Wanted:
    """What ``Cascade.want`` gives: iterate over it, in a ``with`` block, on one thread.

    Every expert of the call comes in exactly one group, or is in ``failed`` at the end. The leases
    of a group are released when the next one is asked for, so that a budget of one record serves a
    call of any size.

    Attributes:
        failed: experts that could not be read, and why.
        stalled_s: seconds for which nothing was readable.
    """

    def __init__(self, cascade: Cascade, ids: list[int], sweep: list[bool], failures: int) -> None:
        self._cascade = cascade
        self.todo = ids
        self.sweep = dict(zip(ids, sweep, strict=True))
        self.failures = failures
        """Those that the cascade had seen when the call began."""
        self.failed: dict[ExpertKey, MoetError] = {}
        self.stalled_s = 0.0
        self._group: list[Lease] = []

    def __iter__(self) -> Iterator[list[Lease]]:
        """Groups of leases.

        Raises:
            TierError: the cascade was closed, or others lease every slot for too long.
        """
        while True:
            self._release()
            self._group = self._cascade.next_group(self)
            if not self._group:
                return
            yield self._group

    def _release(self) -> None:
        for lease in self._group:
            lease.release()
        self._group = []

    def close(self) -> None:
        """Releases what it has and gives up on what has not come; a second time does nothing."""
        self._release()
        self._cascade.give_up(self)

    def __enter__(self) -> Wanted:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
