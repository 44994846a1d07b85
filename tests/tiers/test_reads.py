"""The asynchronous reader, both ways: the right bytes, every end told, nothing left behind."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.disk_records import U8, memory

from moet import _core
from moet.base.errors import TierError
from moet.tiers.reads import Ask, Landed, Reader

KIB, MIB = 1 << 10, 1 << 20
SIZE = 3 * MIB + 1000
ERROR, SHORT, FLIP = 0, 1, 2
PATIENCE_S = 60


@pytest.fixture(params=["uring", "threads"])
def mode(request: pytest.FixtureRequest) -> str:
    if request.param == "uring" and (why := _core.probe_uring()):
        pytest.skip(f"io_uring cannot be used here: {why}")
    return str(request.param)


@pytest.fixture(scope="module")
def data() -> U8:
    return np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


@pytest.fixture
def file(tmp_path: Path, data: U8) -> Path:
    path = tmp_path / "file"
    data.tofile(path)
    return path


def buffered(reader: Reader, path: Path) -> int:
    """The index of a file that goes through the page cache, so that reads need not be aligned."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return reader.core.add_file(fd, direct=False)
    finally:
        os.close(fd)


def landed(futures: list[Future[Landed]]) -> list[int]:
    return [future.result(PATIENCE_S).nbytes for future in futures]


def read_whole(reader: Reader, index: int, to: U8) -> int:
    ask = Ask(index, 0, -(-SIZE // 4096) * 4096, to.ctypes.data)
    return landed(reader.submit([ask]))[0]


def random_asks(rng: random.Random, index: int, step: int, to: U8, count: int) -> list[Ask]:
    """Reads of the whole file's range, beyond its end too, to places that do not overlap."""
    asks, at = [], 0
    for _ in range(count):
        nbytes = rng.choice([1, 2, 16, 255, 256, 300]) * step
        offset = rng.randrange(0, SIZE, step)
        asks.append(Ask(index, offset, nbytes, to.ctypes.data + at, rng.random() < 0.5))
        at += -(-nbytes // 4096) * 4096
    return asks


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("step", [4096, 1])
def test_fuzzed_reads_give_the_files_bytes(
    mode: str, step: int, registered: bool, file: Path, data: U8
) -> None:
    rng = random.Random(step)
    to = memory(20 * 300 * 4096)
    for depth, piece in [(1, 4 * KIB), (3, 64 * KIB), (16, MIB), (64, 8 * KIB)]:
        to[:] = 0xA5
        with Reader(mode, depth=depth, piece=piece) as reader:
            index = reader.open(file).index if step == 4096 else buffered(reader, file)
            if registered:
                reader.register(to.ctypes.data, to.size)
            asks = random_asks(rng, index, step, to, 20)
            got = landed(reader.submit(asks))
            assert (reader.core.running, reader.core.pending) == (0, 0)
        written = np.zeros(to.size, bool)
        for ask, nbytes in zip(asks, got, strict=True):
            wanted = data[ask.offset : ask.offset + ask.nbytes]
            at = ask.address - to.ctypes.data
            assert nbytes == wanted.size
            assert np.array_equal(to[at : at + nbytes], wanted)
            written[at : at + ask.nbytes] = True
        assert np.all(to[~written] == 0xA5), "nothing was written beside the places asked for"


def test_several_devices_and_files(mode: str, tmp_path: Path, data: U8) -> None:
    """A filesystem without O_DIRECT (tmpfs) beside one that may have it."""
    shm = Path("/dev/shm") / f"moet-{os.getpid()}"
    paths = [tmp_path / "a", tmp_path / "b", shm]
    try:
        for i, path in enumerate(paths):
            np.roll(data, i).tofile(path)
        with Reader(mode, depth=2, piece=64 * KIB) as reader:
            files = [reader.open(path) for path in paths]
            to = [memory(SIZE) for _ in paths]
            asks = [Ask(f.index, 0, t.size, t.ctypes.data) for f, t in zip(files, to, strict=True)]
            assert landed(reader.submit(asks)) == [SIZE] * 3
            for i in range(3):
                assert np.array_equal(to[i][:SIZE], np.roll(data, i))
            if not files[2].direct:
                assert any("O_DIRECT" in finding.fact for finding in reader.findings())
    finally:
        shm.unlink(missing_ok=True)


def test_urgent_reads_go_first(mode: str, file: Path) -> None:
    core = _core.Reader(uring=mode == "uring", depth=1, piece=4 * KIB)
    with file.open("rb") as stream:
        index = core.add_file(stream.fileno(), direct=False)
    to = memory(3 * MIB)
    core.submit([(index, 0, MIB, to.ctypes.data + i * MIB, i, i == 2) for i in range(3)])
    order: list[int] = []
    while len(order) < 3:
        order += [tag for tag, *_ in core.take(PATIENCE_S)]
    core.close()
    assert order == [2, 0, 1]


def test_reads_outlive_the_thread_that_asked(mode: str, file: Path, data: U8) -> None:
    """The kernel cancels what a thread has submitted when it ends: ours must not be its."""
    futures: list[Future[Landed]] = []
    to = [memory(SIZE) for _ in range(4)]
    with Reader(mode) as reader:
        index = reader.open(file).index
        asks = [Ask(index, 0, t.size, t.ctypes.data) for t in to]
        thread = threading.Thread(target=lambda: futures.extend(reader.submit(asks)))
        thread.start()
        thread.join()
        assert landed(futures) == [SIZE] * 4
    assert all(np.array_equal(t[:SIZE], data) for t in to)


# What disks do.


@pytest.mark.parametrize("value", [4096, 1, 5000])
def test_short_reads_are_continued(mode: str, value: int, file: Path, data: U8) -> None:
    for direct in (True, False):
        with Reader(mode, piece=64 * KIB) as reader:
            index = reader.open(file).index if direct else buffered(reader, file)
            reader.core.exam_fault(SHORT, 2, 40, value)
            to = memory(SIZE)
            assert read_whole(reader, index, to) == SIZE
            assert np.array_equal(to[:SIZE], data)


@pytest.mark.parametrize("error", [errno.EINTR, errno.EAGAIN])
def test_interruptions_are_nothing(mode: str, error: int, file: Path, data: U8) -> None:
    with Reader(mode, piece=64 * KIB) as reader:
        reader.core.exam_fault(ERROR, 3, 30, error)
        to = memory(SIZE)
        assert read_whole(reader, reader.open(file).index, to) == SIZE
        assert np.array_equal(to[:SIZE], data)


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EIO, errno.ENODEV])
def test_lasting_errors_end_their_read_and_no_other(
    mode: str, error: int, file: Path, data: U8
) -> None:
    with Reader(mode, depth=4, piece=64 * KIB) as reader:
        index = reader.open(file).index
        to = memory(SIZE)
        reader.core.exam_fault(ERROR, 5, 1 << 40, error)
        with pytest.raises(OSError, match=os.strerror(error)) as caught:
            read_whole(reader, index, to)
        assert caught.value.errno == error
        reader.core.exam_fault(ERROR, 1, 0, error)
        assert read_whole(reader, index, to) == SIZE
        assert np.array_equal(to[:SIZE], data)


def test_one_bad_piece_of_many_reads(mode: str, file: Path, data: U8) -> None:
    with Reader(mode, depth=4, piece=64 * KIB) as reader:
        index = reader.open(file).index
        to = [memory(SIZE) for _ in range(6)]
        reader.core.exam_fault(ERROR, 100, 1, errno.EIO)
        futures = reader.submit([Ask(index, 0, t.size, t.ctypes.data) for t in to])
        bad = [f.exception(PATIENCE_S) is not None for f in futures]
        assert sum(bad) == 1
        for t, is_bad in zip(to, bad, strict=True):
            assert is_bad or np.array_equal(t[:SIZE], data)


def test_a_flip_is_seen_by_whoever_compares(mode: str, file: Path, data: U8) -> None:
    with Reader(mode, piece=64 * KIB) as reader:
        reader.core.exam_fault(FLIP, 2, 1, 77)
        to = memory(SIZE)
        assert read_whole(reader, reader.open(file).index, to) == SIZE
        assert (to[:SIZE] != data).sum() == 1


# What callers do.


def test_reads_that_cannot_be_are_refused_and_start_nothing(mode: str, file: Path) -> None:
    with Reader(mode) as reader:
        opened = reader.open(file)
        to = memory(8 * KIB)
        good = Ask(opened.index, 0, 4096, to.ctypes.data)
        bad = [
            good._replace(file=7),
            good._replace(file=-1),
            good._replace(nbytes=0),
            good._replace(address=0),
        ]
        if opened.direct:
            bad += [good._replace(offset=8), good._replace(nbytes=100)]
            bad += [good._replace(address=good.address + 64)]
        for ask in bad:
            with pytest.raises(TierError) as caught:
                reader.submit([good, ask])
            assert caught.value.hint
        assert reader.core.pending == 0
        assert landed(reader.submit([good])) == [4096]


def test_files_can_be_removed_when_nobody_reads_them(mode: str, file: Path) -> None:
    with Reader(mode) as reader:
        first, second = reader.open(file).index, reader.open(file).index
        to = memory(4 * KIB)
        landed(reader.submit([Ask(first, 0, 4096, to.ctypes.data)]))
        reader.core.remove_file(first)
        with pytest.raises(TierError, match="no file"):
            reader.submit([Ask(first, 0, 4096, to.ctypes.data)])
        assert landed(reader.submit([Ask(second, 0, 4096, to.ctypes.data)])) == [4096]


def test_more_files_than_the_kernel_is_told_of(mode: str, file: Path, data: U8) -> None:
    with Reader(mode, depth=1) as reader:
        index = [reader.open(file).index for _ in range(260)][-1]
        to = memory(SIZE)
        assert read_whole(reader, index, to) == SIZE
        assert np.array_equal(to[:SIZE], data)


def test_closing_ends_every_read_and_writes_nothing_afterwards(mode: str, file: Path) -> None:
    to = memory(200 * MIB // 10)
    reader = Reader(mode, depth=2, piece=4 * KIB)
    index = reader.open(file).index
    asks = [Ask(index, 0, MIB, to.ctypes.data + i * MIB) for i in range(20)]
    futures = reader.submit(asks)
    reader.close()
    assert all(future.done() for future in futures)
    to[:] = 0xA5
    errors = [future.exception() for future in futures]
    assert all(e is None or (isinstance(e, OSError) and e.errno == errno.ECANCELED) for e in errors)
    assert errors[-1] is not None, "the last of 5120 pieces was not begun"
    with pytest.raises(TierError, match="closed") as caught:
        reader.submit(asks[:1])
    assert caught.value.hint
    reader.close()
    assert np.all(to == 0xA5)


def test_a_callback_cannot_close_its_own_reader(mode: str, file: Path) -> None:
    errors: list[Exception] = []
    done = threading.Event()

    def close(_: Future[Landed]) -> None:
        try:
            reader.close()
        except TierError as error:
            errors.append(error)
        done.set()

    with Reader(mode) as reader:
        to = memory(4 * KIB)
        (future,) = reader.submit([Ask(reader.open(file).index, 0, 4096, to.ctypes.data)])
        future.add_done_callback(close)
        assert done.wait(PATIENCE_S)
    # Where the read had ended before the callback was added, it ran on this thread and may close.
    assert len(errors) <= 1


def threads_and_files() -> Iterator[int]:
    yield len(os.listdir("/proc/self/task"))
    yield len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("forgotten", [False, True])
def test_nothing_is_left_behind(mode: str, forgotten: bool, file: Path) -> None:
    to = memory(SIZE)
    before = []
    for _ in range(6):
        gc.collect()
        before.append(tuple(threads_and_files()))
        reader = Reader(mode, depth=4)
        read_whole(reader, reader.open(file).index, to)
        if not forgotten:
            reader.close()
        del reader
    gc.collect()
    assert tuple(threads_and_files()) == before[-1] == before[1]


def test_many_threads_share_a_reader(mode: str, file: Path, data: U8) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        to = memory(3 * 300 * 4096)
        try:
            for _ in range(12):
                asks = random_asks(rng, index, 4096, to, 3)
                for ask, nbytes in zip(asks, landed(reader.submit(asks)), strict=True):
                    at = ask.address - to.ctypes.data
                    wanted = data[ask.offset : ask.offset + nbytes]
                    assert np.array_equal(to[at : at + nbytes], wanted)
        except BaseException as error:
            failures.append(error)

    with Reader(mode, depth=8, piece=64 * KIB) as reader:
        index = reader.open(file).index
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


# Opening.


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with Reader("threads") as reader:
        for path, named in [(tmp_path, str(tmp_path)), (tmp_path / "none", "No such file")]:
            with pytest.raises(TierError, match=named) as caught:
                reader.open(path)
            assert caught.value.hint


def test_unknown_modes_and_sizes_are_refused() -> None:
    with pytest.raises(TierError, match="fast") as caught:
        Reader("fast")
    assert "uring" in caught.value.hint
    for depth, piece in [(0, MIB), (16, 1000), (16, 0), (10_000, MIB)]:
        with pytest.raises(TierError):
            Reader("threads", depth=depth, piece=piece)


def test_reads_that_were_interrupted_when_started_hang_nobody(
    mode: str, file: Path, data: U8, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Reader(mode) as reader:
        index = reader.open(file).index

        class Interrupted:
            @staticmethod
            def submit(reads: list[tuple[int, ...]]) -> None:
                core.submit(reads)
                raise KeyboardInterrupt

        to, core = memory(SIZE), reader.core
        ask = Ask(index, 0, 4096, to.ctypes.data)
        with monkeypatch.context() as patched:
            patched.setattr(reader, "_core", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                reader.submit([ask])
        core.submit([(index, 0, 4096, to.ctypes.data, 1 << 40, True)])  # a tag of nobody
        assert read_whole(reader, index, to) == SIZE
        assert np.array_equal(to[:SIZE], data)
