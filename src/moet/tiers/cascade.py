"""RAM over disks as one thing: experts are asked for by the call, and come, wherever they were.

What is in memory is leased at once; reads of the rest begin at once, in one batch, straight into
the slots that the kernels will read. An expert that is absent is waited for, never skipped; one
that cannot be read is named. Which records stay is the policy's business (``policy``,
``placement``) and cannot change an answer.

Nobody can get stuck: whoever waits holds nothing but records that are ready for it or on their way
to it, and gives every group back before it waits for the next (docs/decisions/cascade.md).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np

from moet.base.errors import MoetError, TierError
from moet.base.report import Finding
from moet.base.units import format_bytes
from moet.tiers.api import ExpertKey, Lease
from moet.tiers.below import Below, Catalogue, Failures
from moet.tiers.cascade_stats import CascadeStats, Counters
from moet.tiers.fetch import Arrival
from moet.tiers.hints import Hints
from moet.tiers.placement import Placement, Room, window_slots
from moet.tiers.policy import NOBODY, POLICIES, Part, Policy
from moet.tiers.ram import RamReservation
from moet.tiers.slots import SlotTier
from moet.tiers.wanted import Wanted

GUESSES = 4
"""Reads of expected records at once: a call that needs one of them waits for no more."""
PATIENCE_S = 120.0
REMEMBER_S = 30.0
_TURN_S = 1.0  # a waiting thread looks up so often: signals are delivered between


class _Reading(NamedTuple):
    """A read to be started."""

    record: int
    reservation: RamReservation
    urgent: bool


class Cascade:
    """See the module. Any thread may call anything.

    Args:
        below: where records come from; it must outlive the cascade, and stays its owner's.
        budget: bytes of memory for records, at least one of the largest.
        policy: which records stay.
        window: slots for what the policy does not want to keep; None: by the size of a record.
        rates: share of the decode calls that used each expert, as recorded; see `Policy.prior`.
        patience_s: how long a call waits where others lease every slot.
        remember_s: how long a record that could not be read is not tried again.
        clock: seconds, for tests.

    Raises:
        TierError: nothing below, a budget that holds no record, or not so much memory.
    """

    def __init__(
        self,
        below: Below,
        budget: int,
        *,
        policy: Policy = POLICIES["lfu"],
        window: int | None = None,
        rates: Mapping[ExpertKey, float] | None = None,
        patience_s: float = PATIENCE_S,
        remember_s: float = REMEMBER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._below = below
        self._records = Catalogue(below)
        self.slot_bytes = self._records.slot_bytes
        self._window, self._patience_s, self._clock = window, patience_s, clock
        self._failures = Failures(remember_s, clock)
        self._counters = Counters()
        self._changed = threading.Condition()
        self._resizing = threading.Lock()
        self._findings: list[Finding] = []
        slots = self._target = self._slots_of(budget)
        self._placement = Placement(self._records.layers, policy, slots, self._window_of(slots))
        if rates:
            known = np.array([rates.get(key, 0.0) for key in self._records.keys])
            self._placement.ledger.expect_heat(policy, known)
        self._hints = Hints()
        self._reading = self._guessing = self._starving = 0
        self._pumping = self._closed = False
        self._tier = SlotTier(
            self.slot_bytes,
            slots,
            released=self._released,
            pin=lambda address, nbytes: self._findings.append(below.register(address, nbytes)),
            unpin=below.unregister,
        )

    def _slots_of(self, budget: int) -> int:
        if budget < self.slot_bytes:
            raise TierError(
                f"a budget of {format_bytes(budget)} holds no expert: the largest has "
                f"{format_bytes(self.slot_bytes)}",
                hint="give it room for a few experts at least",
            )
        return min(budget // self.slot_bytes, len(self._records))

    def _window_of(self, slots: int) -> int:
        if self._window is not None:
            return min(self._window, slots)
        return window_slots(slots, self.slot_bytes)

    # What is asked for.

    def want(
        self, keys: Iterable[ExpertKey], prefill: bool | Collection[ExpertKey] = False
    ) -> Wanted:
        """The experts of one call, usually of one layer. Reads begin before it returns.

        Args:
            keys: which, in the order in which they are best read; once each.
            prefill: those that no decoding token asks for: all, none, or which.

        Raises:
            TierError: an expert that there is not, or the cascade is closed.
        """
        wanted = self._records.numbers(keys)
        of = self._records.keys
        sweep = [prefill if isinstance(prefill, bool) else of[i] in prefill for i in wanted]
        with self._changed:
            self._check_open()
            ids = np.array(wanted, np.int64)
            self._placement.pins[ids] += 1
            self._counters.asked(self._placement, ids, self._records.bytes)
            self._placement.use(ids, np.array(sweep, np.bool_))
            call = Wanted(self, wanted, sweep, self._failures.count)
            batch = self._launch(call)
        self._submit(batch)
        return call

    def acquire(self, key: ExpertKey) -> Lease:
        """One expert, waited for; see ``api.Tier.acquire``.

        Raises:
            TierError: it cannot be read, and what ``want`` raises.
        """
        with self.want([key]) as call:
            group = self.next_group(call)
        if not group:
            error = call.failed[key]
            raise TierError(str(error), hint=error.hint) from error
        return group[0]

    def expect(self, keys: Iterable[ExpertKey]) -> None:
        """Says what may be wanted soon, the likeliest first. Reads that somebody waits for go
        first, nothing that is leased gives way, nor other expectations.

        Raises:
            TierError: an expert that there is not, or the cascade is closed.
        """
        expected = self._records.numbers(keys)
        with self._changed:
            self._check_open()
            self._hints.expect(expected)
        self._pump()

    def warm(self) -> None:
        """Begins to fill memory with the experts that recorded heat names, the hottest first."""
        with self._changed:
            self._check_open()
            score = self._placement.ledger.score
            order = np.argsort(-score, kind="stable")[: self._placement.main]
            self._hints.warm(int(i) for i in order if score[i] > 0)
        self._pump()

    # How it comes.

    def next_group(self, call: Wanted) -> list[Lease]:
        """What ``Wanted`` iterates over: leases of all that is readable now, waiting for the first;
        empty when all have come or failed."""
        stuck_since: float | None = None
        while True:
            with self._changed:
                self._check_open()
                group = self._take(call)
                batch = self._launch(call)
                if not (group or batch) and call.todo:
                    if self._reading:
                        stuck_since = None
                    else:  # all slots are others': in need, the main part gives one up
                        batch = self._launch(call, anywhere=True)
                        stuck_since = self._patient(stuck_since)
                    if not batch:
                        self._wait(call)
            self._submit(batch)
            if group or not call.todo:
                return group

    def _patient(self, since: float | None) -> float:
        now = self._clock()
        if since is not None and now - since > self._patience_s:
            raise TierError(
                f"all {self._placement.used} slots have been leased for {self._patience_s:.0f} s",
                hint="release leases, or give experts more memory",
            )
        return now if since is None else since

    def _wait(self, call: Wanted) -> None:
        began = time.monotonic()
        self._starving += 1
        try:
            self._changed.wait(_TURN_S)
        finally:
            self._starving -= 1
            waited = time.monotonic() - began
            call.stalled_s += waited
            self._counters.stall_s += waited

    def _take(self, call: Wanted) -> list[Lease]:
        """Leases of what is readable; the pin of the waiting call becomes the lease's."""
        group: list[Lease] = []
        left = []
        for i in call.todo:
            if self._placement.there[i]:
                group.append(self._tier.acquire(self._records.keys[i]))
            elif (error := self._failed(i, call)) is not None:
                call.failed[self._records.keys[i]] = error
                self._unpin(i)
            else:
                left.append(i)
        call.todo = left
        return group

    def _failed(self, record: int, call: Wanted) -> MoetError | None:
        """Why a record is not worth waiting for, if it is not."""
        if self._placement.coming[record]:
            return None
        return self._failures.why(record, call.failures)

    def give_up(self, call: Wanted) -> None:
        """What ``Wanted.close`` does."""
        with self._changed:
            for i in call.todo:
                self._unpin(i)
            call.todo = []
            self._trim()
            self._changed.notify_all()

    def _unpin(self, record: int) -> None:
        """A call waits for it no longer."""
        place = self._placement
        place.pins[record] -= 1
        if not (place.there[record] or place.coming[record]):
            place.left(record)

    def _launch(self, call: Wanted, *, anywhere: bool = False) -> list[_Reading]:
        """Reads of what is absent, as many as there is room for."""
        batch: list[_Reading] = []
        place = self._placement
        for i in call.todo:
            if place.there[i] or place.coming[i] or self._failed(i, call) is not None:
                continue
            room = place.room(i, sweep=call.sweep[i], anywhere=anywhere and not batch)
            if room is None:
                break
            batch.append(self._begin(i, room, urgent=True))
        return batch

    def _begin(self, record: int, room: Room, *, urgent: bool) -> _Reading:
        if room.leaves != NOBODY:
            self._drop(room.leaves)
        self._reading += 1
        self._guessing += not urgent
        reservation = self._tier.reserve(self._records.keys[record], self._records.sizes[record])
        return _Reading(record, reservation, urgent)

    def _drop(self, record: int) -> None:
        self._tier.evict(self._records.keys[record])
        self._counters.evictions += 1

    def _submit(self, batch: list[_Reading]) -> None:
        """Starts reads, outside of the lock."""
        if not batch:
            return
        asks = [(self._records.keys[r.record], r.reservation.address) for r in batch]
        try:
            futures = self._below.read_many(asks, urgent=batch[0].urgent)
        except BaseException as error:
            for reading in batch:
                self._ended(reading, error, 0.0)
            if not isinstance(error, MoetError):
                raise
            return
        for reading, future in zip(batch, futures, strict=True):
            future.add_done_callback(partial(self._landed, reading))

    def _landed(self, reading: _Reading, future: Future[Arrival]) -> None:
        error = future.exception()
        self._ended(reading, error, 0.0 if error else future.result().seconds)
        self._pump()

    def _ended(self, reading: _Reading, error: BaseException | None, seconds: float) -> None:
        record, place = reading.record, self._placement
        with self._changed:
            self._reading -= 1
            self._guessing -= not reading.urgent
            if error is None:
                reading.reservation.__exit__(None, None, None)
                place.arrived(record)
                self._failures.forget(record)
                nbytes = self._records.sizes[record]
                self._counters.landed(nbytes, seconds, guess=not reading.urgent)
            elif isinstance(error, Exception):  # else a disk may write there all the same
                reading.reservation.__exit__(type(error), error, None)
                self._note(record, error)
                place.left(record)
            self._trim()
            self._changed.notify_all()

    def _note(self, record: int, error: BaseException) -> None:
        """A read has failed. A guess that nobody waits for yet is tried again when it is wanted."""
        self._counters.failures += 1
        if not isinstance(error, MoetError):
            what = f"{self._records.keys[record]}: {type(error).__name__}: {error}"
            error = TierError(what, hint="this is a fault of moet: please report it")
        if self._placement.pins[record]:
            self._failures.note(record, error)

    def _released(self, key: ExpertKey) -> None:
        """A lease has ended."""
        with self._changed:
            self._placement.pins[self._records.number(key)] -= 1
            self._trim()
            if self._starving:
                self._changed.notify_all()

    def _pump(self) -> None:
        """Starts reads of what is expected, as far as nothing else suffers. A read that is over at
        once comes back here: the one that is at it goes on."""
        while True:
            with self._changed:
                if self._pumping or self._closed or not (batch := self._guess()):
                    return
                self._pumping = True
            try:
                self._submit(batch)
            finally:
                with self._changed:
                    self._pumping = False

    def _guess(self) -> list[_Reading]:
        batch: list[_Reading] = []
        done: list[int] = []
        place = self._placement
        for i in self._hints:
            if self._guessing >= GUESSES:
                break
            if not (place.there[i] or place.coming[i] or i in self._failures):
                room = place.room_for_guess(i)
                if room is None:
                    break
                batch.append(self._begin(i, room, urgent=False))
            done.append(i)
        self._hints.drop(done)
        return batch

    # How much memory it takes.

    def resize(self, budget: int) -> int:
        """Changes the budget while everything goes on. To shrink, the least worth are dropped;
        leased ones follow when they are released.

        Returns:
            Bytes that the arena takes now.

        Raises:
            TierError: a budget that holds no record, or not so much memory; nothing is changed.
        """
        slots = self._slots_of(budget)
        with self._resizing:
            with self._changed:
                self._check_open()
                before, self._target = self._target, slots
                if slots < self._placement.slots:
                    self._placement.resize(slots, self._window_of(slots))
                self._trim()
            try:
                if slots > self._tier.slots:
                    self._tier.grow(slots - self._tier.slots)
            except BaseException:
                with self._changed:
                    self._target = before
                raise
            with self._changed:
                self._placement.resize(slots, self._window_of(slots))
                self._changed.notify_all()
        self._pump()
        return self._tier.capacity

    def _trim(self) -> None:
        """Drops what is over the budget and may go, and gives its memory back."""
        if self._tier.slots <= self._target:
            return
        while (record := self._placement.surplus()) != NOBODY:
            self._drop(record)
        idle = self._tier.slots - max(self._target, self._placement.used)
        if idle > 0:
            self._tier.shrink(idle)

    # What can be seen.

    def __contains__(self, key: object) -> bool:
        return key in self._records

    def nbytes(self, key: ExpertKey) -> int:
        """Size of a record that is there, in memory or not."""
        return self._records.sizes[self._records.number(key)]

    def keys(self) -> Iterator[ExpertKey]:
        """Keys of all records, in memory or not."""
        return iter(self._records.keys)

    def resident(self) -> dict[ExpertKey, Part]:
        """Records in memory, and which part of it keeps them."""
        with self._changed:
            part = self._placement.ledger.part
            there = np.flatnonzero(self._placement.there)
            return {self._records.keys[i]: Part(int(part[i])) for i in there}

    def failed(self) -> dict[ExpertKey, MoetError]:
        """Records that could not be read when they were wanted last, and why."""
        with self._changed:
            return {self._records.keys[i]: why for i, why in self._failures.errors().items()}

    def forgive(self) -> None:
        """Tries records that could not be read again when they are wanted next."""
        with self._changed:
            self._failures.clear()

    def findings(self) -> list[Finding]:
        """Whether memory could be registered with what reads."""
        return list(self._findings)

    def stats(self) -> CascadeStats:
        """Counters, consistent with each other."""
        with self._changed:
            place = self._placement
            return CascadeStats(
                budget=self._target * self.slot_bytes,
                arena=self._tier.capacity,
                slot=self.slot_bytes,
                records=len(self._records),
                resident=int(place.there.sum()),
                window=int((place.there & (place.ledger.part == Part.WINDOW)).sum()),
                leases=int(place.pins.sum()),
                failed=len(self._failures),
                **self._counters.counted(),  # type: ignore[arg-type]
            )

    # Its end.

    def close(self) -> None:
        """Waits for reads that are under way and gives the memory back; the second time does
        nothing. Calls that wait are told.

        Raises:
            TierError: a lease is held.
        """
        with self._changed:
            if self._closed:
                return
            if leases := self._tier.stats().leases:
                what = f"the cascade cannot be closed: {leases} leases are held"
                raise TierError(what, hint="release them first")
            self._closed = True
            self._hints.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._reading)
        self._tier.close()

    def _check_open(self) -> None:
        if self._closed:
            raise TierError("the cascade is closed", hint="make a new one")

    def __enter__(self) -> Cascade:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
