"""The card tier: records in one block of a card's memory, copied there beside running steps.

Leases give addresses of the card; ``view`` copies back. A record can be acquired only when the card
has passed the event behind its copy, so whoever holds a lease may hand its address to work that is
enqueued from then on, on any stream. Leaving a reservation therefore waits for that one copy. What
overlaps are the copies of several threads, and those of one ``upload`` (docs/decisions/slots.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import CopyError, MoetError, TierError
from moet.base.units import format_bytes
from moet.tiers.api import RECORD_ALIGNMENT, ExpertKey, Lease
from moet.tiers.memory import CardMemory, Event
from moet.tiers.records import ArenaTier
from moet.tiers.staging import Staging, StagingRing

MOST_IN_FLIGHT: Final = 8
"""Copies that one ``upload`` has under way: enough that the copy engine never waits for Python."""


class _Flight(NamedTuple):
    """A record whose copy has been started."""

    key: ExpertKey
    offset: int
    nbytes: int
    staging: Staging | None
    event: Event


class CardReservation:
    """See ``api.Reservation``. The buffer is pinned host memory; leaving copies it to the card and
    returns when the record can be acquired."""

    __slots__ = ("_nbytes", "_offset", "_open", "_staging", "_tier", "buffer", "key")

    def __init__(
        self, tier: CardTier, key: ExpertKey, offset: int, nbytes: int, staging: Staging
    ) -> None:
        self._tier = tier
        self._open = True
        self._offset = offset
        self._nbytes = nbytes
        self._staging = staging
        self.key = key
        self.buffer = staging.bytes[:nbytes]

    @property
    def address(self) -> int:
        """Address of the first byte of the buffer: host memory."""
        return self._staging.address

    def __enter__(self) -> CardReservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._open:
            self._open = False
            self.buffer = np.empty(0, np.uint8)
            written = kind is None
            self._tier.end_reservation(
                self.key, self._offset, self._nbytes, self._staging, written=written
            )


class CardTier(ArenaTier):
    """Records in a card's memory (see ``api.Tier``).

    Args:
        memory: of the card; it outlives the tier.
        capacity_bytes: what records may take in all, each rounded up to 4096 bytes.
        record_bytes: of the largest record: what a staging buffer holds.
        staging: how many buffers; that many reservations can be open at once.
        patience_s: how long a reservation waits for a buffer before it is an error.

    Raises:
        TierError: a size below 1, fewer than two buffers, or the memory is not there.
    """

    def __init__(
        self,
        memory: CardMemory,
        capacity_bytes: int,
        *,
        record_bytes: int,
        staging: int = 4,
        patience_s: float = 60.0,
    ) -> None:
        super().__init__(capacity_bytes)
        self._memory = memory
        self._patience_s = patience_s
        self._registered: tuple[range, ...] = ()
        self.direct_bytes = 0
        """Bytes that landed straight from registered memory."""
        self.staged_bytes = 0
        """Bytes that landed by way of staging buffers."""
        with ExitStack() as owned:
            self._base = self._allocate(owned)
            self._staging = StagingRing(memory, staging, record_bytes)
            owned.callback(self._staging.close)
            self._owned = owned.pop_all()

    def _allocate(self, owned: ExitStack) -> int:
        """The block; the address of its first record."""
        nbytes = self.capacity + RECORD_ALIGNMENT  # an aligned start lies inside
        try:
            block = self._memory.allocate(nbytes)
        except MoetError as error:
            raise TierError(
                f"the card has no {format_bytes(nbytes)} for experts: {error}{self._room()}",
                hint="keep fewer experts on the card, or leave it more memory",
            ) from error
        owned.callback(self._memory.free, block)
        return block + -block % RECORD_ALIGNMENT

    def _room(self) -> str:
        with suppress(MoetError):
            free, total = self._memory.room()
            return f"; {format_bytes(free)} of {format_bytes(total)} are free"
        return ""

    # What the books ask of the memory.

    def address_of(self, offset: int) -> int:
        """Address of a byte of the block, on the card."""
        return self._base + offset

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """A copy of a part of the block, u8 [nbytes]."""
        data = np.empty(nbytes, np.uint8)
        with _card(f"{format_bytes(nbytes)} cannot be read back"):
            self._memory.copy_out(data.ctypes.data, self.address_of(offset), nbytes)
        return data

    def free_memory(self) -> None:
        """Gives the card's memory and the pinned buffers back, and unregisters."""
        with _card("the tier's memory cannot be given back"):
            self._owned.close()

    # Writing.

    def reserve(self, key: ExpertKey, nbytes: int) -> CardReservation:
        """Room for a new record and a buffer to write it in; see ``api.Tier.reserve``.

        Waits while all buffers are in use.

        Raises:
            TierError: also for a record that no buffer holds, and where none was free for
                ``patience_s`` (the room is given back).
        """
        offset, staging = self._begin(key, nbytes, deque())
        return CardReservation(self, key, offset, nbytes, staging)

    def _begin(self, key: ExpertKey, nbytes: int, flights: deque[_Flight]) -> tuple[int, Staging]:
        """A record's offset and a buffer for it; neither where one is not to be had."""
        offset = self.begin_record(key, nbytes)
        try:
            return offset, self._take_staging(nbytes, flights)
        except BaseException:
            self.drop_record(key, offset, nbytes)
            raise

    def _take_staging(self, nbytes: int, flights: deque[_Flight]) -> Staging:
        """A buffer. ``flights``, the caller's own copies, give theirs back first: nobody waits for
        others' buffers while holding some, so two uploads cannot wait for each other."""
        ring = self._staging
        if nbytes > ring.nbytes:
            what = f"a record of {nbytes} bytes does not fit in a staging buffer of {ring.nbytes}"
            raise TierError(what, hint="make the tier with the size of its largest record")
        while flights:
            if staging := ring.take(0):
                return staging
            self._land(flights.popleft())
        if staging := ring.take(self._patience_s):
            return staging
        raise TierError(
            f"all {ring.count} staging buffers were in use for {self._patience_s:g} s",
            hint="end open reservations, or give the tier more staging buffers",
        )

    def end_reservation(
        self, key: ExpertKey, offset: int, nbytes: int, staging: Staging, *, written: bool
    ) -> None:
        """Called at the end of a reservation: copies and publishes, or drops."""
        if written:
            self._land(self._start(key, offset, nbytes, staging.address, staging))
        else:
            self.drop_record(key, offset, nbytes)
            self._staging.give(staging)

    def _start(
        self, key: ExpertKey, offset: int, nbytes: int, source: int, staging: Staging | None
    ) -> _Flight:
        """Starts a record's copy. Where it cannot be started everything is as it was before, unless
        it may have been: then room and buffer are never used again, as in ``_land``."""
        try:
            with _card(f"the copy of {key} to the card, {format_bytes(nbytes)}, did not start"):
                event = self._memory.copy_in(self.address_of(offset), source, nbytes)
        except TierError as error:
            if isinstance(error.__cause__, CopyError):
                self.lose_record(key)
                raise
            self.drop_record(key, offset, nbytes)
            if staging:
                self._staging.give(staging)
            raise
        return _Flight(key, offset, nbytes, staging, event)

    def _land(self, flight: _Flight) -> None:
        """Waits for a copy and publishes its record.

        Where waiting fails nobody knows whether the card still copies: the record's room and the
        buffer are never used again.
        """
        try:
            with _card(f"the copy of {flight.key} to the card, {format_bytes(flight.nbytes)}"):
                self._memory.wait(flight.event)
                self._memory.drop(flight.event)
        except BaseException:
            self.lose_record(flight.key)
            raise
        self.publish_record(flight.key, flight.offset, flight.nbytes)
        with self._lock:
            self.staged_bytes += flight.nbytes if flight.staging else 0
            self.direct_bytes += 0 if flight.staging else flight.nbytes
        if flight.staging:
            self._staging.give(flight.staging)

    # Uploads from another tier.

    def register_host(self, address: int, nbytes: int) -> None:
        """Page-locks host memory, a RAM tier's arena, so that ``upload`` copies straight from it.

        Seconds for a large arena. The memory must outlive this tier.

        Raises:
            TierError: refused; ``upload`` then copies through the staging buffers, at the speed
                of one thread's memcpy. The caller says so to the user.
        """
        with self._lock:
            self._check_open()
        with _card(f"{format_bytes(nbytes)} of host memory cannot be page-locked"):
            self._memory.register(address, nbytes)
        self._owned.callback(self._memory.unregister, address)
        self._registered += (range(address, address + nbytes),)

    def upload(self, leases: Iterable[Lease]) -> int:
        """Copies records of a tier in host memory under the same keys; several at a time.

        Each becomes readable as soon as it has landed. The leases must be held until this returns.
        Several threads may upload at once.

        Returns:
            Bytes copied.

        Raises:
            TierError: as ``reserve``. The copies that were under way are waited for; whatever is
                readable is whole.
        """
        flights: deque[_Flight] = deque()
        nbytes = 0
        try:
            for lease in leases:
                if len(flights) == MOST_IN_FLIGHT:
                    self._land(flights.popleft())
                flights.append(self._launch(lease, flights))
                nbytes += lease.nbytes
            while flights:
                self._land(flights.popleft())
        finally:  # only after an error is anything left
            while flights:
                with suppress(TierError):
                    self._land(flights.popleft())
        return nbytes

    def _launch(self, lease: Lease, flights: deque[_Flight]) -> _Flight:
        """Starts the copy of a leased record, from where it lies or by way of a buffer."""
        key, nbytes, source = lease.key, lease.nbytes, lease.address
        if any(source in known and source + nbytes <= known.stop for known in self._registered):
            return self._start(key, self.begin_record(key, nbytes), nbytes, source, None)
        offset, staging = self._begin(key, nbytes, flights)
        try:
            staging.bytes[:nbytes] = lease.view()
        except BaseException:
            self.end_reservation(key, offset, nbytes, staging, written=False)
            raise
        return self._start(key, offset, nbytes, staging.address, staging)

    # Eviction.

    def evict(self, key: ExpertKey, fence: Event | None = None) -> None:
        """Drops a record; see ``api.Tier.evict``.

        Args:
            key: whose.
            fence: an event behind the last enqueued work that may read the record. Copies that are
                started from now on wait for it, on the card. Not needed where a lease was held
                until that work had ended.
        """
        if fence is not None:
            with _card(f"the fence of {key} cannot be waited for"):
                self._memory.hold_copies(fence)
        super().evict(key)

    def __enter__(self) -> CardTier:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def _card(what: str) -> Iterator[None]:
    """Errors of the card as errors of the tier."""
    try:
        yield
    except MoetError as error:
        hint = error.hint or "look for an earlier error of the card"
        raise TierError(f"{what}: {error}", hint=hint) from error
