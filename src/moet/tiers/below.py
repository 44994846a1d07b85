"""What a cascade reads from: records by number, and which of them cannot be read just now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import MoetError, TierError
from moet.base.report import Finding
from moet.tiers.api import RECORD_ALIGNMENT, ExpertKey
from moet.tiers.fetch import Arrival


class Below(Protocol):
    """Where records come from: ``nvme.NvmeTier``, or one for tests."""

    def keys(self) -> Iterator[ExpertKey]:
        """Keys of all records."""

    def nbytes(self, key: ExpertKey) -> int:
        """Size of a record."""

    def read_many(
        self, wanted: Iterable[tuple[ExpertKey, int]], *, urgent: bool = True
    ) -> Sequence[Future[Arrival]]:
        """Starts reads to addresses; see ``NvmeTier.read_many``. The memory is no longer written
        to when a future is done, whatever its outcome."""

    def register(self, address: int, nbytes: int) -> Finding:
        """Pins memory that records will be read to."""

    def unregister(self, address: int) -> None:
        """Ends ``register``."""


class Catalogue:
    """The records below, numbered by their keys' order.

    Attributes:
        keys: by number.
        sizes: in bytes, by number.
        bytes: the same as an array.
        layers: which of the model's MoE layers each is of, from 0 up.
        slot_bytes: of the largest, rounded up to 4096.

    Raises:
        TierError: there are none.
    """

    def __init__(self, below: Below) -> None:
        self.keys = sorted(below.keys())
        if not self.keys:
            raise TierError("there are no records below", hint="open a model with routed experts")
        self._numbers = {key: i for i, key in enumerate(self.keys)}
        self.sizes = [below.nbytes(key) for key in self.keys]
        self.bytes = np.array(self.sizes, np.int64)
        self.slot_bytes = -(-max(self.sizes) // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
        layers = np.unique([key.layer for key in self.keys], return_inverse=True)[1]
        self.layers: NDArray[np.int64] = layers.astype(np.int64)

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: object) -> bool:
        return key in self._numbers

    def number(self, key: ExpertKey) -> int:
        """The number of a key that is there."""
        return self._numbers[key]

    def numbers(self, keys: Iterable[ExpertKey]) -> list[int]:
        """Numbers of keys in their order, each once.

        Raises:
            TierError: there is no such record.
        """
        try:
            return list(dict.fromkeys(self._numbers[key] for key in keys))
        except KeyError as error:
            hint = "it is of another model, or of another rank"
            raise TierError(f"no record of {error.args[0]}", hint=hint) from error


class _Failure(NamedTuple):
    error: MoetError
    until: float
    number: int


class Failures:
    """Records that could not be read. Its user guards it.

    Args:
        remember_s: how long one is not worth another try.
        clock: seconds.

    Attributes:
        count: failures so far: their numbers go from 1 up.
    """

    def __init__(self, remember_s: float, clock: Callable[[], float]) -> None:
        self._remember_s, self._clock = remember_s, clock
        self._of: dict[int, _Failure] = {}
        self.count = 0

    def note(self, record: int, error: MoetError) -> None:
        """It failed now."""
        self.count += 1
        self._of[record] = _Failure(error, self._clock() + self._remember_s, self.count)

    def why(self, record: int, since: int) -> MoetError | None:
        """Why it is not worth a try, for a call that began after ``since`` failures: it failed
        during the call, or a short while before."""
        failure = self._of.get(record)
        if failure and (failure.number > since or self._clock() < failure.until):
            return failure.error
        return None

    def forget(self, record: int) -> None:
        """It could be read."""
        self._of.pop(record, None)

    def clear(self) -> None:
        """All may be tried again."""
        self._of.clear()

    def __contains__(self, record: object) -> bool:
        return record in self._of

    def __len__(self) -> int:
        return len(self._of)

    def errors(self) -> dict[int, MoetError]:
        """Why, by record."""
        return {record: failure.error for record, failure in self._of.items()}
