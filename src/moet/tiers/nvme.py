"""The NVMe tier: records on disks, read to wherever they are wanted, and only whole ones delivered.

It is read-only, so it has no reservations, leases or evictions: nothing in it moves or goes away. A
file that changes all the same is an error of the reads that meet it. What a lease is to the other
tiers, the future of a read is here: until it is done bytes may still be written to the place, and
when it is done the record there is whole and checked, or the future has the error.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from enum import StrEnum
from functools import partial

from moet.base.errors import TierError
from moet.base.report import Finding
from moet.tiers.api import RECORD_ALIGNMENT, ExpertKey, Reservation, Tier
from moet.tiers.bounce import Bounce
from moet.tiers.fetch import Arrival, Fetch, Publish
from moet.tiers.files import OpenFile
from moet.tiers.read_errors import ChecksumError, FileChangedError, ReadError
from moet.tiers.reads import Landed, Reader, Reads
from moet.tiers.readstats import Meter, ReadStats
from moet.tiers.source import Bytes, Place, RecordSource

SAMPLE = 16
"""With ``Verify.SAMPLE``: the first read of every record is verified, and one in so many others."""
TRIES = 2
BOUNCE_BYTES = 256 << 20


class Verify(StrEnum):
    """Which arrivals are compared with their checksums."""

    ALWAYS = "always"
    SAMPLE = "sample"
    NEVER = "never"


class NvmeTier:
    """Records of a source, read on demand. Any thread may ask for any number.

    Args:
        source: where they lie.
        reads: what reads them; the tier closes it. None: a ``Reader`` that chooses by itself.
        verify: which arrivals are verified.
        workers: threads that verify and put together.
        bounce_bytes: of the buffers of records that are put together, at most.

    Raises:
        TierError: a file cannot be opened or is not as the source describes it.
    """

    def __init__(
        self,
        source: RecordSource,
        *,
        reads: Reads | None = None,
        verify: Verify = Verify.ALWAYS,
        workers: int = 2,
        bounce_bytes: int = BOUNCE_BYTES,
    ) -> None:
        self._source = source
        self._verify = verify
        self._reads = Reader() if reads is None else reads
        with ExitStack() as undo:
            undo.callback(self._reads.close)
            self._files = [self._open(i) for i in range(len(source.files))]
            self._workers = ThreadPoolExecutor(workers, thread_name_prefix="moet-verify")
            undo.pop_all()
        self._bounce = Bounce(bounce_bytes)
        self._meter = Meter(len(list(source.keys())))
        self._lock = threading.Lock()
        self._seen: set[ExpertKey] = set()
        self._since_sample = 0
        self._closed = False

    def _open(self, index: int) -> OpenFile:
        described = self._source.files[index]
        opened = self._reads.open(described.path)
        for what, wanted, found in (
            ("bytes", described.size, opened.size),
            ("as its time of change in ns", described.mtime_ns, opened.mtime_ns),
        ):
            if wanted not in {None, found}:
                raise TierError(
                    f"{described.path} has {found} {what}, where {wanted} were expected",
                    hint="the file was replaced: make it again from what is there now",
                )
        return opened

    def __contains__(self, key: object) -> bool:
        return key in self._source

    def keys(self) -> Iterator[ExpertKey]:
        """Keys of all records."""
        return self._source.keys()

    def nbytes(self, key: ExpertKey) -> int:
        """Size of a record.

        Raises:
            TierError: there is none.
        """
        return self._place(key).nbytes

    def read(self, key: ExpertKey, into: int, *, urgent: bool = True) -> Future[Arrival]:
        """Reads a record to ``into``; see ``read_many``."""
        return self.read_many([(key, into)], urgent=urgent)[0]

    def read_many(
        self, wanted: Iterable[tuple[ExpertKey, int]], *, urgent: bool = True
    ) -> list[Future[Arrival]]:
        """Starts reads of records, all at once.

        Args:
            wanted: keys, and the addresses that their records go to: multiples of 4096, with room
                up to a multiple of 4096 bytes, as every reservation of a tier has. The memory must
                stay until the future is done, whatever its outcome.
            urgent: before reads that are not (guesses of what will be needed).

        Returns:
            A future each, which nobody can cancel. It fails with a ``ReadError`` that names the
            key where also the second try failed. Its callbacks run on a thread of the tier's and
            must be short.

        Raises:
            TierError: no such record, an address that is not aligned, or the tier is closed.
                Nothing was started.
        """
        fetches = [self._fetch(key, into, urgent, None) for key, into in wanted]
        self._begin(fetches)
        return [fetch.future for fetch in fetches]

    def load(self, key: ExpertKey, to: Tier, *, urgent: bool = True) -> Future[Arrival]:
        """Reads a record into another tier. It can be acquired there when the future is done;
        where the future has an error there is nothing.

        Raises:
            TierError: as ``read_many``, or as ``to.reserve``.
        """
        reservation = to.reserve(key, self.nbytes(key))
        publish = partial(_end_reservation, reservation)
        try:
            fetch = self._fetch(key, reservation.address, urgent, publish)
            self._begin([fetch])
        except Exception as error:  # after a ctrl-C the disk may write to its room all the same
            publish(error)
            raise
        return fetch.future

    def register(self, address: int, nbytes: int) -> Finding:
        """Pins memory that records will be read to, an arena: saves looking it up at every read.
        The finding tells whether that was possible; reads work all the same."""
        return self._reads.register(address, nbytes)

    def unregister(self, address: int) -> None:
        """Ends ``register``: before the memory is given back."""
        self._reads.unregister(address)

    def findings(self) -> list[Finding]:
        """How disks are read, and why so."""
        return self._reads.findings()

    def stats(self) -> ReadStats:
        """Counters, consistent with each other."""
        return self._meter.read()

    def close(self) -> None:
        """Fails reads that have not begun, waits for the others, closes the files; the second time
        does nothing. Not from a callback of a future."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._bounce.close()
        self._reads.stop()
        self._meter.wait_idle()
        self._workers.shutdown()
        self._reads.close()

    def __enter__(self) -> NvmeTier:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # How a record gets here.

    def _place(self, key: ExpertKey) -> Place:
        try:
            place = self._source.place(key)
        except KeyError as error:
            hint = "ask for a key that the source has"
            raise TierError(f"no record of {key}", hint=hint) from error
        if why := self._odd(place):
            raise TierError(f"the source misplaces {key}: {why}", hint="make the source again")
        return place

    def _odd(self, place: Place) -> str:
        """What is wrong with a place; empty: nothing."""
        if place.nbytes < 1 or not place.spans:
            return f"{place.nbytes} bytes in {len(place.spans)} spans"
        for span in place.spans:
            if not 0 <= span.file < len(self._files):
                return f"file {span.file} of {len(self._files)}"
            size = self._files[span.file].size
            if span.offset < 0 or span.nbytes < 1 or span.offset + span.nbytes > size:
                return f"{span.nbytes} bytes at {span.offset} of a file of {size}"
        if place.finish is None:
            span = place.spans[0]
            if len(place.spans) != 1 or span.nbytes != place.nbytes:
                return f"{len(place.spans)} spans and nothing that makes a record of them"
            if span.offset % RECORD_ALIGNMENT:
                return f"a record at {span.offset}, not a multiple of {RECORD_ALIGNMENT}"
        return ""

    def _fetch(self, key: ExpertKey, into: int, urgent: bool, publish: Publish | None) -> Fetch:
        if into <= 0 or into % RECORD_ALIGNMENT:
            raise TierError(
                f"{key} cannot be read to address {into:#x}",
                hint=f"records start at multiples of {RECORD_ALIGNMENT}",
            )
        verify = self._wants_check(key)
        return Fetch(
            key,
            self._place(key),
            self._files,
            into,
            verify=verify,
            urgent=urgent,
            publish=publish,
        )

    def _wants_check(self, key: ExpertKey) -> bool:
        if self._verify is not Verify.SAMPLE:
            return self._verify is Verify.ALWAYS
        with self._lock:
            self._since_sample = (self._since_sample + 1) % SAMPLE
            return key not in self._seen or self._since_sample == 0

    def _begin(self, fetches: list[Fetch]) -> None:
        """Starts reading. Those that need a buffer wait for it and go on by themselves."""
        with self._lock:
            if self._closed:
                raise TierError("the tier is closed", hint="make a new one")
            self._meter.add(in_flight=len(fetches))
        straight = [fetch for fetch in fetches if not fetch.bounce_bytes]
        try:
            self._submit(straight)
        except BaseException:
            self._meter.add(in_flight=-len(fetches))
            raise
        for fetch in fetches:
            if fetch.bounce_bytes:
                self._bounce.ask(fetch.bounce_bytes, partial(self._with_buffer, fetch))

    def _with_buffer(self, fetch: Fetch, buffer: Bytes | None) -> None:
        fetch.buffer = buffer
        try:
            if buffer is None:
                raise TierError("the tier was closed before it was read", hint="make a new one")
            self._submit([fetch])
        except BaseException as error:
            self._fail(fetch, error)

    def _submit(self, fetches: list[Fetch]) -> None:
        asks = [(fetch, fetch.asks()) for fetch in fetches]
        landings = iter(self._reads.submit([ask for _, of in asks for ask in of]) if asks else [])
        for fetch, of in asks:
            fetch.tries += 1
            fetch.landings = [next(landings) for _ in of]
            _when_all(fetch.landings, partial(self._landed, fetch))

    def _landed(self, fetch: Fetch) -> None:
        """On the reader's thread, when the last read of a record has ended."""
        good = [f.result() for f in fetch.landings if not f.exception()]
        self._meter.add(
            nbytes_read=sum(landed.nbytes for landed in good),
            queue_s=sum(landed.queued_s for landed in good),
            disk_s=sum(landed.disk_s for landed in good),
        )
        if not fetch.needs_a_worker():
            self._settle(fetch)
            return
        try:
            self._workers.submit(self._settle, fetch)
        except RuntimeError as error:  # the interpreter is ending
            self._fail(fetch, error)

    def _settle(self, fetch: Fetch) -> None:
        try:
            arrival = fetch.settle()
            if fetch.publish:
                fetch.publish(None)
        except ReadError as error:
            self._retry(fetch, error)
        except BaseException as error:
            self._fail(fetch, error)
        else:
            self._give_back(fetch)
            with self._lock:
                self._seen.add(fetch.key)
            self._meter.add(verified=fetch.verify, verify_s=fetch.verify_s)
            self._meter.delivered(arrival.nbytes, arrival.seconds)
            fetch.future.set_result(arrival)

    def _retry(self, fetch: Fetch, error: ReadError) -> None:
        """The second try, where one may help: a file that was changed stays so."""
        self._meter.add(mismatches=isinstance(error, ChecksumError))
        if fetch.tries >= TRIES or self._closed or isinstance(error, FileChangedError):
            self._fail(fetch, error)
            return
        self._meter.add(retries=1)
        try:
            self._submit([fetch])
        except BaseException as closed:
            closed.__context__ = error
            self._fail(fetch, closed)

    def _fail(self, fetch: Fetch, error: BaseException) -> None:
        self._give_back(fetch)
        try:
            if fetch.publish:
                fetch.publish(error)
        finally:
            self._meter.add(failures=1, in_flight=-1, verify_s=fetch.verify_s)
            fetch.future.set_exception(error)

    def _give_back(self, fetch: Fetch) -> None:
        if fetch.buffer is not None:
            buffer, fetch.buffer = fetch.buffer, None
            self._bounce.give(buffer)


def _when_all(futures: list[Future[Landed]], then: partial[None]) -> None:
    """Calls ``then`` once, when the last one is done, on the thread that ends it."""
    lock = threading.Lock()
    left = len(futures)

    def one_less(_: Future[Landed]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            then()

    for future in futures:
        future.add_done_callback(one_less)


def _end_reservation(reservation: Reservation, error: BaseException | None) -> None:
    """Leaves a reservation as its ``with`` block would."""
    if error is None:
        reservation.__exit__(None, None, None)
    else:
        reservation.__exit__(type(error), error, error.__traceback__)
