"""Uploads into free slots of a card while steps run: experts come and go that no step uses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import numpy as np

from moet.hybrid.split import Split
from moet.tiers.api import ExpertKey, Lease
from moet.tiers.card import CardTier

SPARE_SLOTS: Final = 4
"""Records beyond those of the splits, for which the tier must have room."""

_PAUSE_S: Final = 0.002


class Uploads:
    """A thread that uploads and evicts, until `stop`.

    Args:
        tier: of the card.
        leases: of all experts in host memory.
        seed: of the choice.
    """

    def __init__(self, tier: CardTier, leases: Mapping[ExpertKey, Lease], seed: int) -> None:
        self._tier, self._leases = tier, dict(leases)
        self._rng = np.random.default_rng(seed)
        self._free = list(self._leases)
        self._turn, self._ending = threading.Lock(), threading.Event()
        self._error: Exception | None = None
        self._done = 0
        self._thread = threading.Thread(target=self._work, name="exam-uploads", daemon=True)
        self._thread.start()

    @contextmanager
    def held(self) -> Iterator[Callable[[Split], None]]:
        """Inside, nothing is uploaded; gives what is told the split that the card holds now."""
        with self._turn:
            yield self._know

    def _know(self, split: Split) -> None:
        on_card = {ExpertKey(i, e) for i, experts in split.items() for e in experts}
        self._free = [key for key in self._leases if key not in on_card]

    def _work(self) -> None:
        while not self._ending.wait(_PAUSE_S):
            try:
                with self._turn:
                    self._once()
            except Exception as error:  # whatever it is: without uploads the exam shows nothing
                self._error = error
                return

    def _once(self) -> None:
        count = min(SPARE_SLOTS, len(self._free))
        picked = self._rng.choice(len(self._free), count, replace=False) if count else ()
        keys = [self._free[int(i)] for i in picked]
        self._tier.upload([self._leases[key] for key in keys])
        for key in keys:  # no table has had them: no step can be reading
            self._tier.evict(key)
        self._done += len(keys)

    def stop(self) -> int:
        """Ends the thread; how many experts came and went.

        Raises:
            Exception: what ended the thread: a TierError where an upload failed.
        """
        self._ending.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._done
