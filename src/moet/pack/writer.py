"""Writes a pack: at the disk's speed, in constant memory, and never one that opens but is wrong.

Threads take experts in the order of the checkpoint's files; each reads, repacks, hashes and writes
one record at a time. Every other second what was written is brought to the disk and then told to
the journal, so that a run that was killed goes on from there. The manifest comes last, and only if
the checkpoint is still what it was at the start.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from moet.base.errors import UsageError
from moet.base.log import get
from moet.base.units import format_bytes, format_rate
from moet.checkpoint.keys import in_file_order
from moet.checkpoint.open import Checkpoint, open_checkpoint
from moet.machine.memory import read_memory
from moet.pack.blockfile import BlockFile, aligned_buffer, replace_file, sync_folder
from moet.pack.expert_reader import ExpertReader, OpenFiles
from moet.pack.faults import BrokenPack, PackFault, unreadable, unwritable
from moet.pack.identity import as_text, difference, identify, pack_name, with_contents
from moet.pack.journal import JOURNAL, Journal
from moet.pack.locks import LOCK, FolderLock
from moet.pack.reader import open_pack
from moet.pack.spec import MANIFEST, DataFile, Manifest, PackModel, Plan, checksum_of, data_name
from moet.pack.sweep import Sweep, Work, choose_threads

_log = get("pack.writer")

Progress = Callable[[int, int], None]

SPARE_BYTES = 64 << 20  # left free on each disk besides the records
SCRATCH_BYTES = 4 << 20  # of one thread's reader, about
_COMMIT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class WriteReport:
    """What a run did.

    Attributes:
        folder: the pack's.
        records: of the pack.
        kept: of these, written by an earlier run and found whole.
        nbytes: of all records.
        seconds: wall time.
        threads: that read and wrote.
        direct: whether the data went past the page cache.
    """

    folder: Path
    records: int
    kept: int
    nbytes: int
    seconds: float
    threads: int
    direct: bool

    @property
    def rate(self) -> float:
        """Bytes of records a second, those that were found whole included."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


def plan_pack(checkpoint: Checkpoint, folders: Sequence[Path]) -> Plan:
    """What will be written, and where.

    Args:
        checkpoint: an open one.
        folders: where packs are kept, one a disk; the records are dealt out to all of them. The
            pack's own folder, of the same name in each, is made there; the manifest goes into the
            first.

    Raises:
        BrokenCheckpoint: a file of the checkpoint cannot be read.
        UsageError: no folder, one twice, or one whose path is no text.
    """
    places = [Path(os.path.abspath(folder)) for folder in folders]
    if not places or len({place.resolve() for place in places}) < len(places):
        hint = "give one folder a disk: --out DIR --out DIR"
        raise UsageError("a pack needs one folder or several different ones", hint=hint)
    if odd := [place for place in places if as_text(place) != str(place)]:
        hint = "give a folder whose path is UTF-8"
        raise UsageError(f"the path {as_text(odd[0])} cannot be written down", hint=hint)
    source = identify(checkpoint)
    name = pack_name(checkpoint, source)
    homes = [str(place / name) if i else "" for i, place in enumerate(places)]
    return Plan(
        model=PackModel.of(checkpoint.geometry),
        source=as_text(checkpoint.folder.resolve()),
        checkpoint=source,
        files=tuple(DataFile(home, data_name(i)) for i, home in enumerate(homes)),
    )


def write_pack(
    checkpoint: Checkpoint,
    folders: Sequence[Path],
    *,
    threads: int = 0,
    hash_contents: bool = False,
    drop_cache: bool | None = None,
    progress: Progress | None = None,
) -> WriteReport:
    """Writes the pack of a checkpoint, or goes on with one that was begun.

    Where the pack is there already and fits the checkpoint, no record is written.

    Args:
        checkpoint: an open one.
        folders: see ``plan_pack``.
        threads: that read, repack and write; 0: by the machine, and by the size of a record.
        hash_contents: read all of the checkpoint at the end and keep its hash in the manifest; in
            that of a pack that is there, too.
        drop_cache: tell the kernel to forget the checkpoint's pages as they are read. By default
            where the files would fill more than half of the memory that is left.
        progress: called with bytes of records done and in all, a few times a second.

    Raises:
        BrokenCheckpoint: a file of the checkpoint cannot be read, or has shrunk.
        FormatError: a scale byte 255, with tensor name and index.
        BrokenPack: NO_SPACE, WRITE_FAILED, IN_USE, FOREIGN, BAD_JOURNAL, CHANGED; or what
            ``open_pack`` says of the pack that is there. What was written stays, to go on from; so
            it does after a KeyboardInterrupt.
        UsageError: see ``plan_pack``; fewer threads than none.
    """
    if threads < 0:
        raise UsageError(f"{threads} threads", hint="0 means by the machine")
    plan = plan_pack(checkpoint, folders)
    home = Path(os.path.abspath(folders[0])) / pack_name(checkpoint, plan.checkpoint)
    if drop_cache is None:
        drop_cache = checkpoint.expert_bytes > read_memory().available // 2
    start = time.monotonic()
    with ExitStack() as stack:
        run = _Run(checkpoint, plan, home, stack, drop_cache=drop_cache, progress=progress)
        already = run.prepare()
        if not already:
            run.write(threads)
            run.finish(hash_contents=hash_contents)
        elif hash_contents:
            run.add_contents()
    report = WriteReport(
        folder=home,
        records=plan.records,
        kept=plan.records if already else run.kept,
        nbytes=plan.nbytes,
        seconds=time.monotonic() - start,
        threads=run.threads,
        direct=run.direct,
    )
    _log.info(
        "%s: %d records, %d kept, %s, %s",
        *(home, report.records, report.kept, format_bytes(plan.nbytes), format_rate(report.rate)),
    )
    return report


def homes(plan: Plan, home: Path) -> list[Path]:
    """The folders of a pack, one a data file."""
    return [Path(file.folder) if file.folder else home for file in plan.files]


def check_space(plan: Plan, home: Path) -> None:
    """Refuses to start what the disks cannot hold; files that are there in part count.

    Raises:
        BrokenPack: NO_SPACE with the numbers of the disk, or UNREADABLE.
    """
    needed: dict[int, int] = {}
    places: dict[int, Path] = {}
    for number, folder in enumerate(homes(plan, home)):
        place = next(path for path in (folder, *folder.parents) if path.exists())
        disk = place.stat().st_dev
        has = _allocated(folder / plan.files[number].name)
        needed[disk] = needed.get(disk, 0) + max(0, plan.file_bytes(number) - has)
        places[disk] = folder
    for disk, nbytes in needed.items():
        place = next(path for path in (places[disk], *places[disk].parents) if path.exists())
        state = os.statvfs(place)
        free = state.f_bavail * state.f_frsize
        if nbytes and nbytes + SPARE_BYTES > free:
            what = f"{format_bytes(nbytes)} are to be written and {format_bytes(free)} are free"
            raise BrokenPack(PackFault.NO_SPACE, places[disk], what)


def _allocated(file: Path) -> int:
    """Bytes that a file takes on its disk; 0 where there is none."""
    try:
        return file.stat().st_blocks * 512
    except OSError:
        return 0


class _Run:
    """One run of the writer; ``stack`` closes and unlocks everything."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        home: Path,
        stack: ExitStack,
        *,
        drop_cache: bool,
        progress: Progress | None,
    ) -> None:
        self.checkpoint = checkpoint
        self.plan = plan
        self.home = home
        self.stack = stack
        self.drop_cache = drop_cache
        self.progress = progress
        self.checksums: dict[int, int] = {}
        self.kept = 0
        self.threads = 0
        self.direct = False
        self._finished: deque[tuple[int, int, bool]] = deque()
        self._committed = time.monotonic()
        self._batch: list[tuple[int, int]] = []

    def prepare(self) -> bool:
        """Locks, looks at what is there, opens the files. True: the pack is there already."""
        if self._is_there():
            return True
        check_space(self.plan, self.home)
        for folder in homes(self.plan, self.home):
            self._enter(folder)
        if self._is_there():  # another run has finished it meanwhile
            return True
        if not (self.home / JOURNAL).exists():
            self._refuse_foreign()
        self.journal = Journal(self.home, self.plan)
        self.stack.callback(self.journal.close)
        self.files = [self._data_file(i) for i in range(len(self.plan.files))]
        self.direct = all(file.direct for file in self.files)
        for folder in homes(self.plan, self.home):
            sync_folder(folder)
            sync_folder(folder.parent)
        return False

    def _is_there(self) -> bool:
        if not (self.home / MANIFEST).exists():
            return False
        open_pack(self.home, self.checkpoint)
        with suppress(OSError):  # a run that was killed after its manifest; harmless where it stays
            (self.home / JOURNAL).unlink(missing_ok=True)
        return True

    def _enter(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(folder, error, "the folder cannot be made") from error
        self.stack.enter_context(FolderLock(folder, shared=False))

    def _refuse_foreign(self) -> None:
        """A new pack goes into folders with nothing in them; a killed start may have left names."""
        for folder in homes(self.plan, self.home):
            try:
                names = {entry.name for entry in folder.iterdir()}
            except OSError as error:
                raise unreadable(folder, error) from error
            if odd := sorted(names - {LOCK, JOURNAL + ".partial"}):
                what = f"{odd[0]} is there and no journal says what it is"
                raise BrokenPack(PackFault.FOREIGN, folder, what)

    def _data_file(self, number: int) -> BlockFile:
        folder = homes(self.plan, self.home)[number]
        file = BlockFile(folder / self.plan.files[number].name, write=True)
        self.stack.callback(file.close)
        file.resize(self.plan.file_bytes(number))
        return file

    def write(self, threads: int) -> None:
        """All records. What an earlier run has written is kept where its bytes hash right."""
        record_bytes = self.plan.layout.record_bytes
        self.threads = choose_threads(threads, record_bytes + SCRATCH_BYTES)
        self.sources = OpenFiles()
        self.stack.callback(self.sources.close)
        keys = in_file_order(self.checkpoint, self.plan.keys)
        order = [index for key in keys if (index := self.plan.index(key)) is not None]
        self._committed = time.monotonic()
        try:
            Sweep(order, self.threads, self._worker, "moet-pack").run(self._tick)
        except BaseException:  # ctrl-C, too: what is whole by now is not done again
            with suppress(BrokenPack):  # the first error is the one to tell
                self._drain()
                self._commit()
            raise
        self._commit()

    def _worker(self) -> Work:
        plan, layout = self.plan, self.plan.layout
        record = aligned_buffer(layout.record_bytes)
        reader = ExpertReader(
            self.checkpoint.tensors,
            self.sources,
            layout,
            range(plan.model.intermediate),
            down_bias=True,
            drop_cache=self.drop_cache,
        )

        def work(index: int) -> None:
            number, offset = plan.place(index)
            before = self.journal.records.get(index)
            if before is not None:
                self.files[number].read(record, offset)
                if checksum_of(record) == before:
                    self._finished.append((index, before, True))
                    return
            reader.read(self.checkpoint.expert_tensors(*plan.keys[index]), record)
            checksum = checksum_of(record)
            self.files[number].write(record, offset)
            self._finished.append((index, checksum, False))

        return work

    def _tick(self) -> None:
        self._drain()
        if self._batch and time.monotonic() - self._committed > _COMMIT_S:
            self._commit()
        if self.progress:
            done = len(self.checksums) * self.plan.layout.record_bytes
            self.progress(done, self.plan.nbytes)

    def _drain(self) -> None:
        while self._finished:
            index, checksum, kept = self._finished.popleft()
            self.checksums[index] = checksum
            self.kept += kept
            if not kept:
                self._batch.append((index, checksum))

    def _commit(self) -> None:
        """First the records, then the lines that tell of them."""
        if self._batch:
            for file in self.files:
                file.sync()
            self.journal.add(self._batch)
            self._batch = []
        self._committed = time.monotonic()

    def finish(self, *, hash_contents: bool) -> None:
        """The manifest, if the checkpoint is what it was."""
        self._write_manifest(tuple(self._in_order()), hash_contents=hash_contents)
        try:
            (self.home / JOURNAL).unlink(missing_ok=True)
        except OSError as error:
            raise unwritable(self.home / JOURNAL, error, "cannot be removed") from error

    def add_contents(self) -> None:
        """The hashes of the checkpoint's files into the manifest of a pack that nobody uses."""
        pack = open_pack(self.home, self.checkpoint)
        if all(file.content is not None for file in pack.plan.checkpoint):
            return
        self.stack.enter_context(FolderLock(self.home, shared=False))
        self.plan = pack.plan  # its files may lie in other folders than were given now
        self._write_manifest(pack.manifest.checksums, hash_contents=True)

    def _write_manifest(self, checksums: tuple[int, ...], *, hash_contents: bool) -> None:
        plan = self.plan
        if hash_contents:
            files = with_contents(self.checkpoint, plan.checkpoint, self.progress)
            plan = replace(plan, checkpoint=files)
        self._refuse_changed()
        manifest = Manifest(plan=plan, checksums=checksums)
        replace_file(self.home / MANIFEST, manifest.to_bytes())

    def _refuse_changed(self) -> None:
        """The files are what they were, and what is in them lies where it was read."""
        now = open_checkpoint(self.checkpoint.folder)
        odd = difference(self.plan.checkpoint, identify(now))
        if not odd and now.tensors != self.checkpoint.tensors:
            odd = "its headers are not those that it was opened with"
        if odd:
            raise BrokenPack(PackFault.CHANGED, self.checkpoint.folder, odd)

    def _in_order(self) -> Iterable[int]:
        assert len(self.checksums) == self.plan.records
        return (self.checksums[index] for index in range(self.plan.records))
