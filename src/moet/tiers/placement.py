"""Who is in memory and who leaves for whom: a policy at work on slots, without the slots' memory.

``Cascade`` moves bytes by these decisions; a replay counts what they would have cost. Not
thread-safe: whoever has one guards it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from moet.base.errors import TierError
from moet.tiers.policy import (
    NOBODY,
    Ids,
    Ledger,
    Mask,
    Part,
    Policy,
    admits,
    oldest,
    over_protected,
    victim,
)

WINDOW_BYTES: Final = 64 << 20
"""Of the window: enough reads at once for any disk."""
MOST_WINDOW: Final = 16
"""Slots of it, where records are small."""


def window_slots(slots: int, slot_bytes: int) -> int:
    """Slots of the window where nobody has said how many."""
    enough = max(2, -(-WINDOW_BYTES // slot_bytes))
    return max(1, min(slots // 4, enough, MOST_WINDOW))


class Room(NamedTuple):
    """A place for a newcomer.

    Attributes:
        part: which part it joins.
        leaves: who must be dropped first; NOBODY: a slot is free.
    """

    part: Part
    leaves: int


class Placement:
    """Records in slots of one size.

    The main part holds what the policy wants to keep; the window takes the rest of what is needed
    now, in LRU order, so that a budget smaller than a call's experts still gets on.

    Args:
        layers: index of each record's layer, [N].
        policy: the scheme.
        slots: how many records memory holds.
        window: how many of them are the window's; at least 1 where not all records fit.

    Attributes:
        pins: leases and waiting calls of each record, [N]: who has any stays.
        there: can be read, [N].
        coming: is being read, [N].
        hinted: was read on a guess and not used yet, [N].
    """

    def __init__(self, layers: Ids, policy: Policy, slots: int, window: int) -> None:
        count = len(layers)
        self.policy = policy
        self.ledger = Ledger(layers)
        self.pins: Ids = np.zeros(count, np.int64)
        self.there: Mask = np.zeros(count, np.bool_)
        self.coming: Mask = np.zeros(count, np.bool_)
        self.hinted: Mask = np.zeros(count, np.bool_)
        self.resize(slots, window)

    @property
    def used(self) -> int:
        """Slots that hold a record or wait for one."""
        return int(np.count_nonzero(self.there | self.coming))

    @property
    def main(self) -> int:
        """Records that the main part may hold."""
        return self.slots - self.window

    def resize(self, slots: int, window: int) -> None:
        """Changes the budget. What is too much in the main part moves to the window; whoever is
        too much in all leaves by ``surplus``."""
        if slots < 1 or not 0 <= window <= slots:
            raise TierError(
                f"{slots} slots, {window} of them the window's", hint="one slot is the least"
            )
        everything = slots >= len(self.pins)
        self.slots, self.window = slots, 0 if everything else max(1, window)
        self._demote()

    def _demote(self) -> None:
        """Moves to the window what the main part cannot hold, leased or not: nothing is dropped."""
        anybody = np.ones(len(self.pins), np.bool_)
        for _ in range(self.ledger.main() - self.main):
            self.ledger.part[victim(self.ledger, self.policy, anybody, sweep=False)] = Part.WINDOW
        self._cap_protected()

    def _cap_protected(self) -> None:
        if self.policy.protected:
            self.ledger.part[over_protected(self.ledger, self.policy, self.main)] = Part.PROBATION

    def use(self, ids: Ids, sweep: Mask) -> None:
        """A call of a layer uses records; see ``Ledger.use``. Those in the window that are worth it
        move to the main part."""
        self.ledger.use(self.policy, ids, sweep)
        self.hinted[ids] = False
        self._cap_protected()
        for at in np.flatnonzero(self.ledger.part[ids] == Part.WINDOW):
            i = int(ids[at])
            self.ledger.part[i] = self._part_for(i, self.free(), sweep=bool(sweep[at]))

    def _part_for(self, newcomer: int, free: Mask, *, sweep: bool) -> Part:
        """The part that a newcomer joins. Whoever it displaces moves to the window."""
        if self.ledger.main() < self.main:
            return Part.PROBATION
        loser = victim(self.ledger, self.policy, free, sweep=sweep)
        if not admits(self.ledger, self.policy, newcomer, loser):
            return Part.WINDOW
        self.ledger.part[loser] = Part.WINDOW
        return Part.PROBATION

    def free(self) -> Mask:
        """Records that may be dropped, [N]."""
        unpinned: Mask = self.pins == 0
        return self.there & unpinned

    def room(self, newcomer: int, *, sweep: bool, anywhere: bool = False) -> Room | None:
        """Makes a place for a record that is not there and begins to wait for it. Whoever
        ``leaves`` counts as gone.

        Args:
            newcomer: its id.
            sweep: only prefill, or a guess, asks for it.
            anywhere: where the window has nobody to spare, take a place of the main part.

        Returns:
            None where nobody can leave now.
        """
        full = self.used >= self.slots
        part = self._part_for(newcomer, self.free(), sweep=sweep)
        leaves = oldest(self.ledger, self.free()) if full else NOBODY
        if full and leaves == NOBODY and anywhere:
            leaves = victim(self.ledger, self.policy, self.free(), sweep=False)
        if full and leaves == NOBODY:
            return None
        return self._begin(newcomer, part, leaves)

    def room_for_guess(self, newcomer: int) -> Room | None:
        """As ``room``, for a record that somebody may want soon: not in place of other guesses, and
        one slot of the window stays for those who know."""
        full, free = self.used >= self.slots, self.free() & ~self.hinted
        part = self._part_for(newcomer, free, sweep=True)
        if part is Part.WINDOW and self._guesses() >= self.window - 1:
            return None
        leaves = oldest(self.ledger, free) if full else NOBODY
        if full and leaves == NOBODY:
            return None
        self.ledger.last[newcomer] = self.ledger.number
        room = self._begin(newcomer, part, leaves)
        self.hinted[newcomer] = True
        return room

    def _begin(self, newcomer: int, part: Part, leaves: int) -> Room:
        if leaves != NOBODY:
            self.left(leaves)
        self.ledger.part[newcomer] = part
        self.coming[newcomer] = True
        return Room(part, leaves)

    def _guesses(self) -> int:
        return int(np.count_nonzero(self.hinted & (self.ledger.part == Part.WINDOW)))

    def arrived(self, record: int) -> None:
        """A record that was waited for can be read."""
        self.coming[record] = False
        self.there[record] = True

    def left(self, record: int) -> None:
        """A record is gone, or did not come."""
        self.ledger.part[record] = Part.ABSENT
        self.ledger.proven[record] = False
        self.there[record] = self.coming[record] = self.hinted[record] = False

    def surplus(self) -> int:
        """Who must leave because the budget has shrunk, one at a time; NOBODY: it fits, or all that
        are too many are leased."""
        if self.used <= self.slots:
            return NOBODY
        leaves = oldest(self.ledger, self.free())
        if leaves == NOBODY:
            leaves = victim(self.ledger, self.policy, self.free(), sweep=False)
        if leaves != NOBODY:
            self.left(leaves)
        return leaves
