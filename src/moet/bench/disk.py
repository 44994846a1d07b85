"""`moet bench disk`: reads of whole records at random places, beside reading the file in order.

The yardstick is what one thread gets that reads the file from end to end in large blocks past the
page cache, as ``dd iflag=direct`` does; a disk that wants several requests at once gives more. It
and every way to read take turns, so that all figures are of the same minutes. Records are read as a
server reads them: by the same reader, to registered memory where that is allowed, in an order that
no drive can guess.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from moet.base.env import IO_MODES
from moet.base.errors import TierError, UsageError
from moet.base.units import format_bytes
from moet.bench.record import Record, Row, make_record
from moet.bench.timing import median, percentile
from moet.tiers.api import RECORD_ALIGNMENT, ExpertKey
from moet.tiers.arena import Arena
from moet.tiers.files import OpenFile
from moet.tiers.nvme import NvmeTier, Verify
from moet.tiers.reads import DEPTH, PIECE, Ask, Reader
from moet.tiers.source import Place, SourceFile, Span

RECORD_BYTES = 13_369_344
"""Of an expert of DeepSeek-V4-Flash: hidden 4096, intermediate 2048."""
BLOCK_BYTES = 16 << 20
"""Of the sequential reads."""
MOST_DEPTH = 64
PATIENCE_S = 120.0

Progress = Callable[[str, float], None]
"""Told what is being measured and the share done, 0 to 1."""
Start = Callable[[int, int], "Future[Any]"]
"""``start(slot, number)`` begins to read record ``number`` to slot ``slot`` of the arena."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Attributes:
        target: a file to read, or a folder in which one is written meanwhile.
        record_bytes: of a record; a multiple of 4096.
        depths: records in flight.
        file_bytes: of the file that is written.
        seconds: a turn of one figure, at least.
        turns: of each figure.
        mode: ``auto`` (every way that this machine allows), ``uring`` or ``threads``.
        queue_depth: pieces at the device at once.
        piece: bytes of a piece.
        seed: of the order of the reads.
    """

    target: Path
    record_bytes: int = RECORD_BYTES
    depths: tuple[int, ...] = (1, 2, 4, 8)
    file_bytes: int = 4 << 30
    seconds: float = 1.0
    turns: int = 3
    mode: str = "auto"
    queue_depth: int = DEPTH
    piece: int = PIECE
    seed: int = 0

    def __post_init__(self) -> None:
        if self.record_bytes < 1 or self.record_bytes % RECORD_ALIGNMENT:
            what = f"records of {self.record_bytes} bytes"
            raise UsageError(what, hint="whole blocks of 4096 bytes, for example 12MiB")
        if not self.depths or not all(1 <= depth <= MOST_DEPTH for depth in self.depths):
            what = f"a depth of {min(self.depths, default=0)} to {max(self.depths, default=0)}"
            raise UsageError(what, hint=f"1 to {MOST_DEPTH} records in flight")
        if not 0 < self.seconds < 3600 or not 1 <= self.turns <= 1000:
            what = f"{self.turns} turns of {self.seconds:g} s"
            raise UsageError(what, hint="1 to 1000 turns of less than an hour")
        if self.mode not in IO_MODES:
            raise UsageError(f"{self.mode!r} is no way to read", hint=" or ".join(IO_MODES))


@dataclass
class Turns:
    """What the turns of one figure gave: a rate a turn, and seconds of each record."""

    rates: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    nbytes: int = 0


def run(options: Options, progress: Progress) -> Record:
    """Measures, and removes what it wrote.

    Raises:
        UsageError: no such target, or the file is too small.
        TierError: the disk fails, has no room, or memory is missing.
    """
    with file_of(options, progress) as path:
        bench = Bench(options, path)
        with bench.stack:
            rows = list(bench.rows(progress))
            setup = bench.setup()
    return make_record("disk", setup, rows)


class Bench:
    """The file, the readers and the memory that they read to.

    Attributes:
        stack: closes them.
    """

    def __init__(self, options: Options, path: Path) -> None:
        self.options = options
        self.stack = ExitStack()
        size = path.stat().st_size
        self.records = size // options.record_bytes
        if self.records < 2:
            what = f"{path} has {format_bytes(size)}: less than two records"
            raise UsageError(what, hint="name a larger file, or smaller --record bytes")
        self._rng = random.Random(options.seed)
        self._order: list[int] = []
        self._facts: list[str] = []
        self._in_order = Turns()
        self._reads: dict[tuple[str, int], Turns] = {}
        self._tiers = {Verify.NEVER: Turns(), Verify.ALWAYS: Turns()}
        with ExitStack() as undo:
            self.arena = Arena(max(options.depths) * options.record_bytes, populate=True)
            undo.callback(self.arena.close)
            self._file = OpenFile.open(path)
            undo.callback(self._file.close)
            self.readers = [self._reader(undo, mode, path) for mode in modes(options.mode)]
            self._source = RandomSource(self._file, options.record_bytes, self.records)
            self.stack = undo.pop_all()

    def _reader(self, undo: ExitStack, mode: str, path: Path) -> tuple[Reader, int]:
        """A reader with the file's index in it."""
        depth, piece = self.options.queue_depth, self.options.piece
        reader = undo.enter_context(Reader(mode, depth=depth, piece=piece))
        registered = reader.register(self.arena.address, self.arena.bytes.size)
        self._facts += [f.fact for f in (*reader.findings(), registered)]
        return reader, reader.open(path).index

    def setup(self) -> dict[str, Any]:
        """What was measured, for the record."""
        options = self.options
        return {
            "path": str(options.target),
            "file_bytes": self._file.size,
            "filesystem": filesystem(self._file.path),
            "direct": self._file.direct,
            "record_bytes": options.record_bytes,
            "queue_depth": options.queue_depth,
            "piece": options.piece,
            "turns": options.turns,
            "seconds": options.seconds,
            "findings": self._facts,
        }

    def rows(self, progress: Progress) -> Iterator[Row]:
        """Measures everything in turns. Their order is another one each time: what a drive does
        after a burst then falls on all."""
        jobs = self._jobs()
        count = self.options.turns * len(jobs)
        for turn in range(self.options.turns):
            self._rng.shuffle(jobs)
            for i, (what, job) in enumerate(jobs):
                progress(what, (turn * len(jobs) + i) / count)
                job()
        best = median(self._in_order.rates)
        in_order = {"gb_s": best / 1e9, **spread(self._in_order)}
        yield {"kind": "sequential", "block_bytes": BLOCK_BYTES, **in_order}
        for (who, depth), turns in self._reads.items():
            yield {"kind": "read", "who": who, "depth": depth, **figures(turns, best)}
        yield from self._checksum_rows(best)

    def _jobs(self) -> list[tuple[str, Callable[[], None]]]:
        """What a turn is made of."""
        jobs: list[tuple[str, Callable[[], None]]] = [
            ("sequential", lambda: self._sequential(self._in_order))
        ]
        for reader, index in self.readers:
            for depth in self.options.depths:
                turns = self._reads.setdefault((reader.backend, depth), Turns())
                job = partial(self._turn, turns, depth, self._start_of(reader, index))
                jobs.append((f"{reader.backend}, {depth} records in flight", job))
        for verify, turns in self._tiers.items():
            jobs.append((f"checksums {verify}", partial(self._through_tier, turns, verify)))
        return jobs

    def _checksum_rows(self, best: float) -> Iterator[Row]:
        depth, tiers = max(self.options.depths), self._tiers
        for verify, turns in tiers.items():
            who = f"checksums {verify}"
            yield {"kind": "tier", "who": who, "depth": depth, **figures(turns, best)}
        rate = checksum_rate(self.arena.bytes[: self.options.record_bytes])
        kept = median(tiers[Verify.ALWAYS].rates) / median(tiers[Verify.NEVER].rates)
        yield {"kind": "checksum", "gb_s": rate / 1e9, "read_rate_kept": kept}

    def _sequential(self, turns: Turns) -> None:
        """One thread, end to end, as often as there is time."""
        block = mmap.mmap(-1, BLOCK_BYTES)
        began, cpu, nbytes = time.monotonic(), time.process_time(), 0
        while time.monotonic() - began < self.options.seconds:
            offset = nbytes % (self._file.size // BLOCK_BYTES * BLOCK_BYTES or self._file.size)
            got = os.preadv(self._file.fd, [block], offset)
            if got == 0:
                raise TierError(f"{self._file.path} ended at {offset}", hint="it was cut")
            nbytes += got
            forget(self._file)
        note(turns, nbytes, time.monotonic() - began, time.process_time() - cpu)

    def _start_of(self, reader: Reader, index: int) -> Start:
        nbytes, base = self.options.record_bytes, self.arena.address

        def start(slot: int, number: int) -> Future[Any]:
            ask = Ask(index, number * nbytes, nbytes, base + slot * nbytes)
            return reader.submit([ask])[0]

        return start

    def _through_tier(self, turns: Turns, verify: Verify) -> None:
        """The same by way of the tier, with and without checksums."""
        options, nbytes = self.options, self.options.record_bytes
        reads = Reader(modes(options.mode)[0], depth=options.queue_depth, piece=options.piece)
        reads.register(self.arena.address, self.arena.bytes.size)
        with NvmeTier(self._source, reads=reads, verify=verify) as tier:
            base = self.arena.address
            self._turn(
                turns,
                max(options.depths),
                lambda slot, number: tier.read(ExpertKey(0, number), base + slot * nbytes),
                among=self._source.known,
            )

    def _turn(self, turns: Turns, depth: int, start: Start, among: int = 0) -> None:
        """Keeps ``depth`` records in flight until the time is over, and waits for the last."""
        ended: queue.SimpleQueue[tuple[int, float, Future[Any]]] = queue.SimpleQueue()
        began, cpu = time.monotonic(), time.process_time()
        flying = count = 0

        def begin(slot: int) -> None:
            asked = time.monotonic()
            future = start(slot, self._next_record(among))
            future.add_done_callback(lambda done: ended.put((slot, time.monotonic() - asked, done)))

        for slot in range(depth):
            begin(slot)
            flying += 1
        while flying:
            slot, seconds, future = ended.get(timeout=PATIENCE_S)
            raise_if_bad(future, self._file.path)
            turns.latencies.append(seconds)
            flying -= 1
            count += 1
            if time.monotonic() - began < self.options.seconds:
                begin(slot)
                flying += 1
        nbytes = count * self.options.record_bytes
        note(turns, nbytes, time.monotonic() - began, time.process_time() - cpu)

    def _next_record(self, among: int) -> int:
        """A random record; every one comes once before any comes again."""
        if among:
            return self._rng.randrange(among)
        if not self._order:
            self._order = list(range(self.records))
            self._rng.shuffle(self._order)
        return self._order.pop()


class RandomSource:
    """Records of a file as a source for the tier: those of which the checksums are known."""

    def __init__(self, file: OpenFile, nbytes: int, records: int, most: int = 64) -> None:
        self.files = (SourceFile(path=file.path),)
        self.known = min(records, most)
        data = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self._places = {}
        for number in range(self.known):
            os.preadv(file.fd, [data.data], number * nbytes)
            checksum = xxhash.xxh3_64_intdigest(data.data)
            spans = (Span(file=0, offset=number * nbytes, nbytes=nbytes),)
            place = Place(nbytes=nbytes, spans=spans, checksum=checksum)
            self._places[ExpertKey(0, number)] = place

    def keys(self) -> Iterator[ExpertKey]:
        """See ``RecordSource``."""
        return iter(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def place(self, key: ExpertKey) -> Place:
        """See ``RecordSource``."""
        return self._places[key]


def modes(mode: str) -> list[str]:
    """The ways to read that are measured, the best first."""
    if mode != "auto":
        return [mode]
    with Reader("auto") as reader:
        return ["threads"] if reader.why else ["uring", "threads"]


def note(turns: Turns, nbytes: int, seconds: float, cpu_s: float) -> None:
    """Adds a turn."""
    turns.rates.append(nbytes / seconds)
    turns.cpu_s += cpu_s
    turns.nbytes += nbytes


def figures(turns: Turns, sequential: float) -> Row:
    """The numbers of one figure."""
    rate = median(turns.rates)
    return {
        "gb_s": rate / 1e9,
        **spread(turns),
        "of_sequential": rate / sequential,
        "median_ms": median(turns.latencies) * 1e3,
        "p95_ms": percentile(turns.latencies, 95) * 1e3,
        "cpu_s_per_gb": turns.cpu_s / turns.nbytes * 1e9,
        "records": len(turns.latencies),
    }


def spread(turns: Turns) -> Row:
    """The slowest and the fastest turn."""
    return {"gb_s_min": min(turns.rates) / 1e9, "gb_s_max": max(turns.rates) / 1e9}


def checksum_rate(data: NDArray[np.uint8]) -> float:
    """Bytes a second that one thread checks."""
    seconds = []
    for _ in range(9):
        began = time.perf_counter()
        xxhash.xxh3_64_intdigest(data.data)
        seconds.append(time.perf_counter() - began)
    return data.size / median(seconds)


def raise_if_bad(future: Future[Any], path: Path) -> None:
    """The error of a read as one of the bench."""
    error = future.exception()
    if isinstance(error, OSError):
        hint = "look at the kernel's log (dmesg) for the disk's own words"
        raise TierError(f"{path} cannot be read: {error.strerror}", hint=hint) from error
    if error is not None:
        raise error


def forget(file: OpenFile) -> None:
    """Out of the page cache, where reads go through it."""
    if not file.direct:
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def filesystem(path: Path) -> str:
    """Type of the filesystem that holds a file, of the longest mount point above it."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, found, *_ = line.split()
        inside = path.resolve().is_relative_to(point.replace("\\040", " "))
        if inside and len(point) >= len(best):
            best, kind = point, found
    return kind


@contextmanager
def file_of(options: Options, progress: Progress) -> Iterator[Path]:
    """The file to read; one that was written for it is gone afterwards.

    Raises:
        UsageError: the target is neither a file nor a folder.
        TierError: no room, or writing fails.
    """
    target = options.target
    if target.is_file():
        yield target
        return
    if not target.is_dir():
        hint = "name a large file, or a folder on the disk to measure"
        raise UsageError(f"{target} is neither a file nor a folder", hint=hint)
    free = shutil.disk_usage(target).free
    if free < options.file_bytes * 1.05:
        raise TierError(
            f"{format_bytes(free)} are free in {target}, {format_bytes(options.file_bytes)} needed",
            hint="make room, or ask for a smaller file: --size 1GiB",
        )
    try:
        with tempfile.NamedTemporaryFile(prefix="moet-bench-", dir=target) as stream:
            fill(stream.fileno(), options, progress)
            yield Path(stream.name)
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        hint = "make room" if full else "name a folder that this user may write to"
        raise TierError(f"{target} cannot be written to: {error.strerror}", hint=hint) from error


def fill(fd: int, options: Options, progress: Progress) -> None:
    """Random bytes, which no drive can compress or leave out, on the disk and out of the cache."""
    block = np.random.default_rng(options.seed).integers(0, 256, BLOCK_BYTES, np.uint8)
    left = options.file_bytes
    while left > 0:
        progress("writing a file to read", 1 - left / options.file_bytes)
        left -= os.write(fd, np.roll(block, left // 4096).data[: min(left, BLOCK_BYTES)])
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
