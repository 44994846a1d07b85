"""The NVMe tier: whole records or errors with a name, whatever the disk does."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from tests.tiers.disk_records import U8, Disk, memory, write_disk

from moet import _core
from moet.base.errors import FormatError, TierError
from moet.testing.faults import (
    EIO,
    GONE,
    FaultyReads,
    Plan,
    Trouble,
    from_nth_read,
    nth_read,
    reads_at,
)
from moet.testing.tiers import PAGE, A, B, pattern
from moet.tiers.api import ExpertKey
from moet.tiers.fetch import Arrival
from moet.tiers.nvme import SAMPLE, NvmeTier, Verify
from moet.tiers.ram import RamTier
from moet.tiers.read_errors import ChecksumError, FileChangedError, ReadError
from moet.tiers.reads import Reader
from moet.tiers.source import Place, SourceFile, Span

NBYTES = 5 * PAGE + 100
PATIENCE_S = 60
FLIP = Trouble(flip=NBYTES - 1)


def nothing(number: int, ask: object) -> None:
    """A plan without trouble."""


@pytest.fixture(params=["uring", "threads"])
def mode(request: pytest.FixtureRequest) -> str:
    if request.param == "uring" and (why := _core.probe_uring()):
        pytest.skip(f"io_uring cannot be used here: {why}")
    return str(request.param)


KEPT: list[U8] = []


def room(nbytes: int = NBYTES) -> int:
    """The address of memory that stays to the end of the test."""
    KEPT.append(memory(nbytes))
    return int(KEPT[-1].ctypes.data)


@pytest.fixture(autouse=True)
def _forget_rooms() -> Iterator[None]:
    yield
    KEPT.clear()


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return write_disk(tmp_path, count=12, nbytes=NBYTES, files=2)


@contextmanager
def faulty(
    disk: Disk, plan: Plan, mode: str = "auto", verify: Verify = Verify.ALWAYS
) -> Iterator[NvmeTier]:
    reads = FaultyReads(Reader(mode, depth=4, piece=2 * PAGE), plan)
    with NvmeTier(disk, reads=reads, verify=verify) as tier:
        yield tier


def arrived(future: Future[Arrival]) -> Arrival:
    return future.result(PATIENCE_S)


def refused(future: Future[Arrival]) -> BaseException:
    error = future.exception(PATIENCE_S)
    assert error is not None
    return error


def test_every_record_arrives_whole(mode: str, disk: Disk) -> None:
    with faulty(disk, nothing, mode) as tier:
        keys = list(tier.keys())
        to = {key: memory(NBYTES) for key in keys}
        futures = tier.read_many([(key, to[key].ctypes.data) for key in keys])
        for key, future in zip(keys, futures, strict=True):
            got = arrived(future)
            assert (got.key, got.nbytes, got.verified, got.tries) == (key, NBYTES, True, 1)
            assert np.array_equal(to[key][:NBYTES], disk.records[key])
        stats = tier.stats()
        assert (stats.records, stats.reads, stats.verified) == (12, 12, 12)
        assert (stats.nbytes, stats.nbytes_read) == (12 * NBYTES, 12 * 6 * PAGE)
        assert (stats.in_flight, stats.retries, stats.failures, stats.mismatches) == (0, 0, 0, 0)
        assert stats.latency.total == 12
        assert stats.disk_s > 0
        assert stats.verify_s > 0


def test_a_record_is_loaded_into_another_tier(disk: Disk) -> None:
    with faulty(disk, nothing) as tier, RamTier(8 * PAGE, populate=False) as ram:
        future = tier.load(A, ram)
        arrived(future)
        with ram.acquire(A) as lease:
            assert np.array_equal(lease.view(), disk.records[A])
        with pytest.raises(TierError, match="no room"):
            tier.load(B, ram)
        with pytest.raises(TierError, match="there already"):
            tier.load(A, ram)
        assert tier.stats().in_flight == 0


def test_a_load_that_fails_leaves_nothing(disk: Disk) -> None:
    with faulty(disk, from_nth_read(1, EIO)) as tier, RamTier(8 * PAGE, populate=False) as ram:
        assert isinstance(refused(tier.load(A, ram)), ReadError)
        assert A not in ram
        assert ram.stats().used == 0
        ram.put(A, pattern(A, 10))


# What disks do.

TROUBLES = {
    "EIO": EIO,
    "gone": GONE,
    "short": Trouble(short=2 * PAGE),
    "nothing": Trouble(short=0),
    "flip": FLIP,
}


@pytest.mark.parametrize("name", TROUBLES)
def test_trouble_that_passes_is_tried_once_more(mode: str, name: str, disk: Disk) -> None:
    with faulty(disk, nth_read(1, TROUBLES[name]), mode) as tier:
        to = memory(NBYTES)
        assert arrived(tier.read(A, to.ctypes.data)).tries == 2
        assert np.array_equal(to[:NBYTES], disk.records[A])
        stats = tier.stats()
        assert (stats.reads, stats.retries, stats.failures) == (1, 1, 0)
        assert stats.mismatches == (name == "flip")


@pytest.mark.parametrize("name", TROUBLES)
def test_trouble_that_lasts_is_named(mode: str, name: str, disk: Disk) -> None:
    with faulty(disk, from_nth_read(1, TROUBLES[name]), mode) as tier:
        key = ExpertKey(1, 1)  # record 5: the third one of the second file
        error = refused(tier.read(key, room()))
        assert isinstance(error, ReadError)
        assert isinstance(error, ChecksumError) == (name == "flip")
        assert (error.key, error.file, error.offset) == (key, disk.files[1].path, 2 * 6 * PAGE)
        words = {
            "EIO": r"Input/output error \(errno 5\)",
            "gone": "No such device",
            "short": f"only {2 * PAGE} of {NBYTES} bytes",
            "nothing": f"only 0 of {NBYTES} bytes",
            "flip": "checksum",
        }
        with pytest.raises(ReadError, match=words[name]):
            raise error
        assert error.cause in str(error)
        assert error.hint
        stats = tier.stats()
        assert (stats.reads, stats.retries, stats.failures, stats.in_flight) == (0, 1, 1, 0)


def test_one_bad_block_costs_its_record_alone(disk: Disk) -> None:
    with faulty(disk, reads_at(6 * PAGE + 5, EIO)) as tier:  # the second record of each file
        keys = list(tier.keys())
        to = {key: memory(NBYTES) for key in keys}
        futures = tier.read_many([(key, to[key].ctypes.data) for key in keys])
        bad = {key for key, f in zip(keys, futures, strict=True) if f.exception(PATIENCE_S)}
        assert bad == {keys[2], keys[3]}
        assert all(
            np.array_equal(to[key][:NBYTES], disk.records[key]) for key in keys if key not in bad
        )


def test_a_slow_disk_holds_up_its_own_records_alone(disk: Disk) -> None:
    with faulty(disk, nth_read(1, Trouble(delay_s=3600))) as tier:
        to = [memory(NBYTES) for _ in range(2)]
        late = tier.read(A, to[0].ctypes.data)
        arrived(tier.read(B, to[1].ctypes.data))
        assert not late.done()
        assert not late.cancel(), "bytes may come at any time"
        assert tier.stats().in_flight == 1
    assert "closed" in str(refused(late))


def test_a_slow_read_arrives_all_the_same(disk: Disk) -> None:
    with faulty(disk, nth_read(1, Trouble(delay_s=0.05))) as tier:
        to = memory(NBYTES)
        assert arrived(tier.read(A, to.ctypes.data)).seconds >= 0.05
        assert np.array_equal(to[:NBYTES], disk.records[A])
        assert tier.stats().latency.quantile(1.0) >= 0.05


def test_never_verifies_nothing(disk: Disk) -> None:
    with faulty(disk, from_nth_read(1, FLIP), verify=Verify.NEVER) as tier:
        assert not arrived(tier.read(A, room())).verified
        assert tier.stats().verified == 0


def test_samples_hold_every_first_read(disk: Disk) -> None:
    with faulty(disk, nothing, verify=Verify.SAMPLE) as tier:
        to = memory(NBYTES)
        first = [arrived(tier.read(key, to.ctypes.data)).verified for key in tier.keys()]  # noqa: SIM118
        assert all(first)
        again = [arrived(tier.read(A, to.ctypes.data)).verified for _ in range(3 * SAMPLE)]
        assert sum(again) == 3


def test_damage_on_the_disk_is_found_at_the_first_read(disk: Disk) -> None:
    for verify in (Verify.ALWAYS, Verify.SAMPLE):
        with disk.files[0].path.open("r+b") as stream:
            stream.seek(NBYTES - 1)
            stream.write(bytes([int(disk.records[A][-1]) ^ 1]))
        with faulty(disk, nothing, verify=verify) as tier:
            assert isinstance(refused(tier.read(A, room())), ChecksumError)
            assert tier.stats().mismatches == 2


def test_any_mix_of_trouble_gives_right_bytes_or_an_error_with_the_key(
    mode: str, disk: Disk
) -> None:
    rng = random.Random(7)
    choices = [None] * 12 + [*TROUBLES.values(), Trouble(delay_s=0.002)]
    failures: list[BaseException] = []
    outcomes = {"whole": 0, "refused": 0}

    def work(seed: int) -> None:
        own = random.Random(seed)
        keys = list(disk.keys())
        try:
            for _ in range(15):
                chosen = own.sample(keys, 4)
                to = [memory(NBYTES) for _ in chosen]
                asked = [(key, t.ctypes.data) for key, t in zip(chosen, to, strict=True)]
                for key, t, future in zip(chosen, to, tier.read_many(asked), strict=True):
                    error = future.exception(PATIENCE_S)
                    outcomes["refused" if error else "whole"] += 1
                    if error:
                        assert isinstance(error, ReadError)
                        assert error.key == key
                    else:
                        assert np.array_equal(t[:NBYTES], disk.records[key])
        except BaseException as error:
            failures.append(error)

    with faulty(disk, lambda number, ask: rng.choice(choices), mode) as tier:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = tier.stats()
    assert failures == []
    assert stats.reads + stats.failures == 4 * 15 * 4
    assert stats.retries > 0
    assert outcomes["whole"] > outcomes["refused"]


# Files that do not stay as they were.


def test_a_file_that_is_not_as_described_is_refused(disk: Disk) -> None:
    path = disk.files[0].path
    state = path.stat()
    right = SourceFile(path=path, size=state.st_size, mtime_ns=state.st_mtime_ns)
    NvmeTier(replace(disk, files=[right, disk.files[1]])).close()
    for wrong in (replace(right, size=17), replace(right, mtime_ns=17)):
        with pytest.raises(TierError, match="where 17 were expected") as caught:
            NvmeTier(replace(disk, files=[wrong, disk.files[1]]))
        assert caught.value.hint


@pytest.mark.parametrize("change", ["write", "grow", "cut"])
def test_a_file_that_changes_is_named_and_not_tried_again(change: str, disk: Disk) -> None:
    path = disk.files[0].path
    with faulty(disk, nothing, verify=Verify.NEVER) as tier:
        if change == "cut":
            os.truncate(path, PAGE)
        else:
            with path.open("r+b" if change == "write" else "ab") as stream:
                stream.write(b"x")
        if change == "write":
            os.utime(path, ns=(1, 1))
        error = refused(tier.read(A, room()))
        assert isinstance(error, FileChangedError)
        assert "changed under us" in str(error)
        assert tier.stats().retries == 0
        arrived(tier.read(B, room()))  # the other file


def test_a_file_that_is_replaced_goes_on_being_read(disk: Disk) -> None:
    """Its name leads to another one now; the open one still has the bytes that were opened."""
    path = disk.files[0].path
    reads = FaultyReads(Reader(), nothing)
    with NvmeTier(disk, reads=reads) as tier:
        other = path.with_name("other")
        other.write_bytes(bytes(path.stat().st_size))
        other.replace(path)
        to = memory(NBYTES)
        arrived(tier.read(A, to.ctypes.data))
        assert np.array_equal(to[:NBYTES], disk.records[A])
        reads.plan = from_nth_read(1, EIO)
        error = refused(tier.read(A, to.ctypes.data))
        assert "another file was put in its place" in str(error)
        path.unlink()
        assert "leads nowhere" in str(refused(tier.read(A, to.ctypes.data)))


# Records that are put together on arrival.


def interleave(parts: Sequence[U8], record: U8) -> None:
    """A finish of its own: the second part backwards, then the first."""
    first, second = parts
    record[: second.size] = second[::-1]
    record[second.size :] = first


def put_together(disk: Disk, finish: Callable[[Sequence[U8], U8], None] = interleave) -> Disk:
    """The same bytes as records of two spans, at odd offsets of two files."""
    raw = [np.fromfile(file.path, np.uint8) for file in disk.files]
    made = Disk(disk.files)
    for i, key in enumerate(disk.keys()):
        spans = (
            Span(file=0, offset=3 + 1001 * i, nbytes=5000 + i),
            Span(file=1, offset=77 * i, nbytes=1 + 300 * i),
        )
        first, second = (raw[s.file][s.offset : s.offset + s.nbytes] for s in spans)
        made.records[key] = record = np.concatenate([second[::-1], first])
        checksum = xxhash.xxh3_64_intdigest(record.data) if i % 2 else None
        made.places[key] = Place(nbytes=record.size, spans=spans, checksum=checksum, finish=finish)
    return made


@pytest.mark.parametrize("bounce_bytes", [1, 40 * PAGE, 1 << 30])
def test_records_are_put_together(mode: str, bounce_bytes: int, disk: Disk) -> None:
    made = put_together(disk)
    with NvmeTier(made, reads=Reader(mode), bounce_bytes=bounce_bytes) as tier:
        for _ in range(2):
            keys = list(tier.keys()) * 2
            to = [memory(tier.nbytes(key)) for key in keys]
            asked = [(key, t.ctypes.data) for key, t in zip(keys, to, strict=True)]
            for key, t, future in zip(keys, to, tier.read_many(asked), strict=True):
                got = arrived(future)
                assert got.verified == (made.places[key].checksum is not None)
                assert np.array_equal(t[: got.nbytes], made.records[key])


def test_a_finish_that_refuses_is_an_error_of_its_record(disk: Disk) -> None:
    calls: list[int] = []

    def finish(parts: Sequence[U8], record: U8) -> None:
        calls.append(len(parts))
        with pytest.raises(ValueError, match="read-only"):
            parts[0][0] = 1
        raise FormatError("the scale byte 255", hint="download it again")

    with NvmeTier(put_together(disk, finish), bounce_bytes=1) as tier:
        for key in (A, B):
            error = refused(tier.read(key, room(tier.nbytes(key))))
            assert isinstance(error, ReadError)
            assert error.key == key
            assert "scale byte 255" in error.cause
            assert error.hint == "download it again"
    assert calls == [2] * 4


def test_a_finish_with_a_fault_of_its_own_is_not_hidden(disk: Disk) -> None:
    def finish(parts: Sequence[U8], record: U8) -> None:
        raise ZeroDivisionError

    with NvmeTier(put_together(disk, finish)) as tier:
        error = refused(tier.read(A, room(tier.nbytes(A))))
        assert isinstance(error, ZeroDivisionError)
        assert tier.stats().in_flight == 0


def test_closing_turns_away_those_that_wait_for_a_buffer(disk: Disk) -> None:
    made = put_together(disk)
    reads = FaultyReads(Reader(), from_nth_read(1, Trouble(delay_s=3600)))
    tier = NvmeTier(made, reads=reads, bounce_bytes=1)
    asked = [(key, room(tier.nbytes(key))) for key in tier.keys()]  # noqa: SIM118
    futures = tier.read_many(asked)
    tier.close()
    assert all("closed" in str(future.exception(0)) for future in futures)


# What callers do.


def test_what_cannot_be_read_is_refused_and_starts_nothing(disk: Disk) -> None:
    with faulty(disk, nothing) as tier:
        good = room()
        for key, into, words in [
            (ExpertKey(99, 0), good, "no record"),
            (A, good + 64, "cannot be read to address"),
            (A, 0, "cannot be read to address"),
        ]:
            with pytest.raises(TierError, match=words) as caught:
                tier.read_many([(B, good), (key, into)])
            assert caught.value.hint
        assert tier.stats().in_flight == 0
        assert A in tier
        assert ExpertKey(99, 0) not in tier


@pytest.mark.parametrize(
    "change",
    [
        {"spans": ()},
        {"nbytes": 0},
        {"nbytes": NBYTES + 1},
        {"spans": (Span(file=2, offset=0, nbytes=NBYTES),)},
        {"spans": (Span(file=-1, offset=0, nbytes=NBYTES),)},
        {"spans": (Span(file=0, offset=512, nbytes=NBYTES),)},
        {"spans": (Span(file=0, offset=-PAGE, nbytes=NBYTES),)},
        {"spans": (Span(file=0, offset=1 << 40, nbytes=NBYTES),)},
        {"spans": (Span(file=0, offset=0, nbytes=PAGE),) * 2},
    ],
)
def test_a_source_that_misplaces_is_named(change: dict[str, object], disk: Disk) -> None:
    disk.places[A] = replace(disk.places[A], **change)  # type: ignore[arg-type]
    with faulty(disk, nothing) as tier, pytest.raises(TierError, match="misplaces"):
        tier.read(A, room())


def test_a_closed_tier_says_so(disk: Disk) -> None:
    with faulty(disk, nothing) as tier:
        tier.close()
        tier.close()
        with pytest.raises(TierError, match="closed"):
            tier.read(A, room())
        with RamTier(8 * PAGE, populate=False) as ram:
            with pytest.raises(TierError, match="closed"):
                tier.load(A, ram)
            assert ram.stats().used == 0


def test_a_missing_file_is_named_and_nothing_stays_open(disk: Disk) -> None:
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    missing = SourceFile(path=disk.files[0].path.with_name("missing"))
    with pytest.raises(TierError, match="No such file"):
        NvmeTier(replace(disk, files=[disk.files[0], missing]))
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before


def test_findings_tell_how_it_reads(disk: Disk) -> None:
    with NvmeTier(disk, reads=Reader("threads")) as tier:
        assert any("threads were asked for" in f.fact for f in tier.findings())
        to = memory(NBYTES)
        assert "threads" in tier.register(to.ctypes.data, to.size).fact
        tier.unregister(to.ctypes.data)


def test_registered_memory_changes_nothing_but_the_way(mode: str, disk: Disk) -> None:
    with faulty(disk, nothing, mode) as tier:
        arena = memory(16 * 6 * PAGE)
        tier.register(arena.ctypes.data, 8 * 6 * PAGE)
        keys = list(tier.keys())
        places = [arena.ctypes.data + i * 6 * PAGE for i in range(len(keys))]
        for future in tier.read_many(list(zip(keys, places, strict=True))):
            arrived(future)
        tier.unregister(arena.ctypes.data)
        for i, key in enumerate(keys):
            assert np.array_equal(arena[i * 6 * PAGE :][:NBYTES], disk.records[key])


def test_errors_of_reads_keep_what_they_know(tmp_path: Path) -> None:
    error = ReadError(A, tmp_path, 4096, "it broke", hint="mend it")
    assert isinstance(error, TierError)
    assert str(error) == f"expert {A.expert} of layer {A.layer}, {tmp_path} at byte 4096: it broke"
    assert (error.key, error.file, error.offset, error.cause) == (A, tmp_path, 4096, "it broke")
