"""What the card tier needs of a card: memory on both sides, one copy stream, events.

``moet.kernels.cuda.memory`` is a real one, ``moet.testing.card`` one for tests.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

Event = int
"""A point in a stream's work; the memory that made it knows what the number means."""


class CardMemory(Protocol):
    """A card's memory and the copy stream to it. All addresses and sizes in bytes.

    Every method may be called from any thread, and raises a MoetError where the card refuses.
    None waits for other work on the card than it says.
    """

    def room(self) -> tuple[int, int]:
        """Free and total bytes of the card."""

    def allocate(self, nbytes: int) -> int:
        """Memory of the card; its address."""

    def free(self, address: int) -> None:
        """Gives memory of ``allocate`` back."""

    def pin(self, nbytes: int) -> int:
        """Page-locked host memory; its address, page-aligned."""

    def unpin(self, address: int) -> None:
        """Gives memory of ``pin`` back."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-locks host memory that is there already, so that ``copy_in`` may read it."""

    def unregister(self, address: int) -> None:
        """Ends ``register``."""

    def copy_in(self, to: int, source: int, nbytes: int) -> Event:
        """Starts a copy from pinned or registered host memory on the copy stream, behind those
        started before; returns at once. The event is passed when the bytes are there.

        Raises:
            CopyError: it may be under way all the same. After any other error it is not.
        """

    def copy_out(self, to: int, source: int, nbytes: int) -> None:
        """Copies from the card to any host memory, behind what the copy stream has; waits."""

    def record(self, stream: int) -> Event:
        """The point that a stream of the caller's has reached with what it has now."""

    def hold_copies(self, event: Event) -> None:
        """Copies that are started from now on begin after the event. Does not wait itself."""

    def wait(self, event: Event) -> None:
        """Sleeps until the card has passed the event."""

    def drop(self, event: Event) -> None:
        """Forgets an event; each is dropped once, by whoever was given it."""

    def paused(self) -> AbstractContextManager[None]:
        """Inside, no method is at work; calls of other threads wait until it ends."""
