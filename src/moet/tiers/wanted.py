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

    def __iter__(self) -> Iterator[list[Lease]]:
        """Groups of leases.

        Raises:
            TierError: the cascade was closed, or others lease every slot for too long.
        """
        while group := self._cascade.next_group(self):
            try:
                yield group
            finally:
                for lease in group:
                    lease.release()

    def close(self) -> None:
        """Gives up on what has not come; the second time does nothing."""
        self._cascade.give_up(self)

    def __enter__(self) -> Wanted:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
