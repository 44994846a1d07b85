"""Reads every record of a pack from the disk and tells which are not what they should be."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moet.base.errors import UsageError
from moet.checkpoint.keys import ExpertKey
from moet.checkpoint.open import Checkpoint
from moet.pack.blockfile import BlockFile, aligned_buffer
from moet.pack.expert_reader import ExpertReader, OpenFiles
from moet.pack.faults import BrokenPack
from moet.pack.reader import Pack, require_model
from moet.pack.sweep import Sweep, Work, choose_threads
from moet.pack.writer import SCRATCH_BYTES


@dataclass(frozen=True, kw_only=True)
class BadRecord:
    """A record that must not be used.

    Attributes:
        key: which expert.
        file: where it lies.
        offset: of its first byte.
        what: what is wrong with it, as a sentence.
    """

    key: ExpertKey
    file: Path
    offset: int
    what: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        layer, expert = self.key
        place = {"file": str(self.file), "offset": self.offset, "what": self.what}
        return {"layer": layer, "expert": expert, **place}


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What a check found.

    Attributes:
        records: looked at: all.
        nbytes: read from the pack.
        bad: those that are wrong, in the order of the pack.
        compared: whether they were compared with the checkpoint's own bytes too.
        seconds: wall time.
    """

    records: int
    nbytes: int
    bad: tuple[BadRecord, ...]
    compared: bool
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether all are right."""
        return not self.bad


def check_pack(
    pack: Pack,
    checkpoint: Checkpoint | None = None,
    *,
    threads: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> CheckReport:
    """Checks all records.

    Args:
        pack: an open one.
        checkpoint: repack its experts too, and compare byte by byte; None: checksums only.
        threads: that read; 0: by the machine.
        progress: called with bytes done and in all, a few times a second.

    Raises:
        BrokenPack: a data file cannot be opened, the pack is being removed, or OTHER_MODEL.
        BrokenCheckpoint: a file of the checkpoint cannot be read.
        UsageError: fewer threads than none.
    """
    if threads < 0:
        raise UsageError(f"{threads} threads", hint="0 means by the machine")
    if checkpoint is not None:
        require_model(pack, checkpoint)
    start = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(pack.hold())
        check = _Check(pack, checkpoint, stack)
        nbytes = pack.layout.record_bytes * (1 if checkpoint is None else 2)
        number = choose_threads(threads, nbytes + SCRATCH_BYTES)
        sweep = Sweep(range(len(pack)), number, check.worker, "moet-check")

        def tick() -> None:
            if progress:
                progress(len(check.done) * pack.layout.record_bytes, pack.nbytes)

        sweep.run(tick)
    return CheckReport(
        records=len(pack),
        nbytes=pack.nbytes,
        bad=tuple(sorted(check.bad, key=lambda bad: pack.plan.index(bad.key) or 0)),
        compared=checkpoint is not None,
        seconds=time.monotonic() - start,
    )


class _Check:
    """What the threads of one check share."""

    def __init__(self, pack: Pack, checkpoint: Checkpoint | None, stack: ExitStack) -> None:
        self.pack = pack
        self.checkpoint = checkpoint
        self.files = [stack.enter_context(BlockFile(path)) for path in pack.files]
        self.sources = OpenFiles()
        stack.callback(self.sources.close)
        self.done: deque[int] = deque()
        self.bad: deque[BadRecord] = deque()

    def worker(self) -> Work:
        """What one thread does with a record."""
        pack = self.pack
        record = aligned_buffer(pack.layout.record_bytes)
        repack = self._repacker() if self.checkpoint else None

        def work(index: int) -> None:
            key = pack.plan.keys[index]
            place = pack.place(key)
            what = ""
            try:
                self.files[place.file].read(record, place.offset)
                if not pack.matches(key, record):
                    what = "its bytes do not match the checksum"
                elif repack and not np.array_equal(repack(key), record):
                    what = "its bytes are not those of the checkpoint"
            except BrokenPack as error:
                what = f"it cannot be read: {error}"
            if what:
                file = pack.files[place.file]
                self.bad.append(BadRecord(key=key, file=file, offset=place.offset, what=what))
            self.done.append(index)

        return work

    def _repacker(self) -> Callable[[ExpertKey], Any]:
        """Makes records of the checkpoint's own bytes, in one buffer again and again."""
        checkpoint, layout = self.checkpoint, self.pack.layout
        assert checkpoint is not None
        record = aligned_buffer(layout.record_bytes)
        channels = range(layout.intermediate)
        reader = ExpertReader(
            checkpoint.tensors, self.sources, layout, channels, down_bias=True, drop_cache=False
        )

        def repack(key: ExpertKey) -> Any:
            reader.read(checkpoint.expert_tensors(*key), record)
            return record

        return repack
