"""Routed experts of a checkpoint into a tier, straight from the downloaded files.

Threads take experts in the order in which they lie in the files. Each reads into scratch memory of
its own (a MiB or two) and repacks into the record: nothing is kept twice. All or nothing: when
one expert fails, the others of the same call are taken out again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from moet.base.errors import MachineError
from moet.base.log import get
from moet.base.units import format_bytes, format_rate
from moet.checkpoint.geometry import ModelGeometry
from moet.checkpoint.keys import ExpertKey, expert_keys, in_file_order
from moet.checkpoint.open import Checkpoint
from moet.formats.tiling import ExpertLayout
from moet.machine.cpu import usable_cpus, usable_threads
from moet.machine.memory import read_memory
from moet.pack.expert_reader import ExpertReader, OpenFiles, intermediate_slice
from moet.tiers.api import Tier

_log = get("hybrid.load")

_MIN_THREADS, _MAX_THREADS = 4, 16  # below, a drive idles; above, scratch memory grows for nothing


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a load is. Bytes are those of the checkpoint's files."""

    done: int
    total: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second so far; 0 before the first byte."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    @property
    def remaining(self) -> float | None:
        """Seconds left at this rate; None before the first byte."""
        return (self.total - self.done) / self.rate if self.done and self.rate else None


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load did.

    Attributes:
        experts: records written.
        file_bytes: bytes read from files.
        record_bytes: bytes of the records.
        seconds: wall time.
        threads: threads that read.
        dropped_cache: whether the kernel was told to forget the files' pages.
    """

    experts: int
    file_bytes: int
    record_bytes: int
    seconds: float
    threads: int
    dropped_cache: bool

    @property
    def rate(self) -> float:
        """Bytes of the files a second."""
        return self.file_bytes / self.seconds if self.seconds > 0 else 0.0


def record_layout(geometry: ModelGeometry, rank: int = 0, world: int = 1) -> ExpertLayout:
    """The record of one expert on one rank.

    Raises:
        UsageError: no such rank, or more ranks than blocks.
    """
    channels = intermediate_slice(geometry.intermediate, rank, world)
    return ExpertLayout(geometry.hidden, len(channels), geometry.biased)


def tier_bytes(geometry: ModelGeometry, rank: int = 0, world: int = 1) -> int:
    """Capacity that a tier needs for all routed experts of one rank."""
    return len(expert_keys(geometry)) * record_layout(geometry, rank, world).record_bytes


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """What this rank loads, and how."""

    layout: ExpertLayout
    channels: range
    down_bias: bool
    drop_cache: bool
    cpus: Sequence[int]


class _Load:
    """The state that the threads of one load share."""

    def __init__(self, checkpoint: Checkpoint, tier: Tier, part: _Slice) -> None:
        self.checkpoint = checkpoint
        self.tier = tier
        self.part = part
        self.files = OpenFiles()
        self.local = threading.local()
        self.stop = threading.Event()
        self.written: list[ExpertKey] = []

    def _reader(self) -> ExpertReader:
        """The calling thread's own; made at its first expert, on the CPUs it may use.

        Raises:
            MachineError: the kernel lets the thread run on none of them.
        """
        if not hasattr(self.local, "reader"):
            part = self.part
            try:
                os.sched_setaffinity(0, part.cpus)
            except OSError as error:
                what = f"loader threads may not run on CPUs {list(part.cpus)}: {error.strerror}"
                raise MachineError(what, hint="the control group's cpuset forbids it") from error
            self.local.reader = ExpertReader(
                self.checkpoint.tensors,
                self.files,
                part.layout,
                part.channels,
                down_bias=part.down_bias,
                drop_cache=part.drop_cache,
            )
        reader: ExpertReader = self.local.reader
        return reader

    def load_one(self, key: ExpertKey) -> int:
        """One expert; returns the bytes read. Does nothing once the load is being stopped."""
        if self.stop.is_set():
            return 0
        reader = self._reader()
        before = reader.bytes_read
        with self.tier.reserve(key, self.part.layout.record_bytes) as reservation:
            reader.read(self.checkpoint.expert_tensors(*key), reservation.buffer)
        self.written.append(key)
        return reader.bytes_read - before

    def roll_back(self) -> None:
        """Takes out what this load has put in."""
        for key in self.written:
            self.tier.evict(key)


def _bytes_to_read(checkpoint: Checkpoint, keys: Sequence[ExpertKey], channels: range) -> int:
    """What the reader will read: this rank's rows of gate and up, all of down."""
    if not keys:
        return 0
    expert = checkpoint.expert_tensors(*keys[0])
    whole = expert.nbytes
    down = sum(s.nbytes for s in (expert.down.codes, expert.down.scales, expert.down.bias) if s)
    share = len(channels) / checkpoint.geometry.intermediate
    return len(keys) * (down + round((whole - down) * share))


def _run(
    load: _Load,
    keys: Sequence[ExpertKey],
    threads: int,
    total: int,
    progress: Callable[[Progress], None] | None,
) -> int:
    """Loads ``keys``; returns the bytes read. The first error stops the others and is raised."""
    done, start = 0, time.monotonic()
    pool = ThreadPoolExecutor(threads, "moet-load")
    try:
        pending: set[Future[int]] = {pool.submit(load.load_one, key) for key in keys}
        while pending:
            finished, pending = wait(pending, timeout=0.5, return_when=FIRST_EXCEPTION)
            done += sum(future.result() for future in finished)
            if progress:
                progress(Progress(done=done, total=total, seconds=time.monotonic() - start))
    except BaseException:
        load.stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        load.roll_back()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return done


def _slice_of(
    checkpoint: Checkpoint,
    rank: int,
    world: int,
    cpus: Sequence[int] | None,
    drop_cache: bool | None,
) -> _Slice:
    """What a rank loads, what it was not told found on this machine."""
    if drop_cache is None:
        drop_cache = checkpoint.expert_bytes > read_memory().available // 2
    return _Slice(
        layout=record_layout(checkpoint.geometry, rank, world),
        channels=intermediate_slice(checkpoint.geometry.intermediate, rank, world),
        down_bias=rank == 0,
        drop_cache=drop_cache,
        cpus=cpus or usable_cpus(),
    )


def load(
    checkpoint: Checkpoint,
    tier: Tier,
    *,
    rank: int = 0,
    world: int = 1,
    keys: Sequence[ExpertKey] | None = None,
    threads: int = 0,
    cpus: Sequence[int] | None = None,
    drop_cache: bool | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> LoadReport:
    """Loads routed experts into a tier.

    Args:
        checkpoint: an open one.
        tier: where the records go; ``tier_bytes`` says how large it must be for all of them.
        rank: which slice.
        world: of how many.
        keys: which experts; all by default.
        threads: how many read and repack; 0: by the machine.
        cpus: what they may run on; by default what the process may.
        drop_cache: tell the kernel to forget the files' pages as they are read. By default only
            where the files would fill more than half of the memory that is left: a second start
            is fast from the cache, and what else the machine does is not pushed out.
        progress: called about twice a second from this thread.

    Raises:
        BrokenCheckpoint: a file cannot be read, or has shrunk.
        FormatError: a scale byte 255, with tensor name and index.
        TierError: no room, or a key is taken.
        UsageError: no such rank, or more ranks than blocks.
    """
    wanted = expert_keys(checkpoint.geometry) if keys is None else list(keys)
    threads = threads or min(_MAX_THREADS, max(_MIN_THREADS, usable_threads()))
    part = _slice_of(checkpoint, rank, world, cpus, drop_cache)
    state = _Load(checkpoint, tier, part)
    total = _bytes_to_read(checkpoint, wanted, part.channels)
    start = time.monotonic()
    try:
        done = _run(state, in_file_order(checkpoint, wanted), threads, total, progress)
    finally:
        state.files.close()
    report = LoadReport(
        experts=len(wanted),
        file_bytes=done,
        record_bytes=len(wanted) * part.layout.record_bytes,
        seconds=time.monotonic() - start,
        threads=threads,
        dropped_cache=part.drop_cache,
    )
    _log.info(
        "loaded %d experts, %s, at %s", report.experts, format_bytes(done), format_rate(report.rate)
    )
    return report
