"""Loading: every record byte for byte, every slice, every way to fail; nothing left half done."""

from __future__ import annotations

import os
import re
import tempfile
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.base.errors import FormatError, MachineError, MoetError, TierError, UsageError
from moet.checkpoint import BrokenCheckpoint, Checkpoint, Fault, open_checkpoint
from moet.checkpoint.keys import ExpertKey, expert_keys
from moet.formats.mxfp4 import Mxfp4Matrix
from moet.formats.tiling import ExpertWeights, write_expert
from moet.hybrid.load import Progress, load, record_layout, tier_bytes
from moet.pack import expert_reader
from moet.pack.expert_reader import intermediate_slice
from moet.testing.faults import FaultyTier, fail_nth
from moet.testing.toy import FAMILIES, toy_model, write_toy_checkpoint
from moet.tiers.ram import RamTier

SIZES = {"hidden": 160, "intermediate": 96, "experts": 6, "layers": 2}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("toys")
    for family in FAMILIES:
        write_toy_checkpoint(root / family, family, shards=2, **SIZES)
    return {family: root / family for family in FAMILIES}


def tier_for(checkpoint: Checkpoint, rank: int = 0, world: int = 1) -> RamTier:
    return RamTier(tier_bytes(checkpoint.geometry, rank, world), populate=False)


def sliced(weights: ExpertWeights, channels: range, rank: int) -> ExpertWeights:
    """This rank's part, cut by numpy."""
    rows = slice(channels.start, channels.stop)
    blocks = slice(channels.start // 32, channels.stop // 32)
    columns = slice(channels.start // 2, channels.stop // 2)

    def copied(codes: Any, scales: Any) -> Mxfp4Matrix:
        return Mxfp4Matrix(np.ascontiguousarray(codes), np.ascontiguousarray(scales))

    gate, up, down = weights.gate, weights.up, weights.down
    biases: list[Any] = [None] * 3
    if weights.gate_bias is not None:
        assert weights.up_bias is not None
        assert weights.down_bias is not None
        biases = [weights.gate_bias[rows], weights.up_bias[rows]]
        biases += [weights.down_bias if rank == 0 else np.zeros_like(weights.down_bias)]
    return ExpertWeights(
        copied(gate.codes[rows], gate.scales[rows]),
        copied(up.codes[rows], up.scales[rows]),
        copied(down.codes[:, columns], down.scales[:, blocks]),
        *biases,
    )


def check_records(checkpoint: Checkpoint, model: Any, rank: int, world: int) -> None:
    """Loads all experts and compares each record with the one that numpy writes."""
    layout = record_layout(checkpoint.geometry, rank, world)
    channels = intermediate_slice(checkpoint.geometry.intermediate, rank, world)
    wanted = np.empty(layout.record_bytes, np.uint8)
    with tier_for(checkpoint, rank, world) as tier:
        report = load(checkpoint, tier, rank=rank, world=world)
        keys = expert_keys(checkpoint.geometry)
        assert report.experts == len(keys)
        assert report.record_bytes == len(keys) * layout.record_bytes == tier.stats().bytes_written
        for key in keys:
            write_expert(layout, sliced(model.expert(*key), channels, rank), wanted)
            with tier.acquire(key) as lease:
                assert np.array_equal(lease.view(), wanted), key


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("rank", "world"), [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)])
def test_records_equal_numpys(family: str, rank: int, world: int, toys: dict[str, Path]) -> None:
    check_records(open_checkpoint(toys[family]), toy_model(family, **SIZES), rank, world)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("band", [1, 4000])
def test_bands_do_not_show(
    family: str, band: int, toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_reader, "_BAND_BYTES", band)
    check_records(open_checkpoint(toys[family]), toy_model(family, **SIZES), 1, 2)


@settings(max_examples=15, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    blocks=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    world=st.integers(1, 4),
    rank=st.integers(0, 3),
)
def test_records_of_any_shape(family: str, blocks: tuple[int, int], world: int, rank: int) -> None:
    world = min(world, blocks[1])
    sizes = {"hidden": 32 * blocks[0], "intermediate": 32 * blocks[1], "experts": 2, "layers": 1}
    with tempfile.TemporaryDirectory() as folder:
        model = toy_model(family, vocab=32, **sizes)
        model.write(Path(folder))
        check_records(open_checkpoint(Path(folder)), model, rank % world, world)


@given(st.integers(1, 300), st.integers(1, 16))
def test_slices_cover_the_intermediate_size(blocks: int, world: int) -> None:
    if world > blocks:
        with pytest.raises(UsageError) as caught:
            intermediate_slice(32 * blocks, 0, world)
        assert caught.value.hint
        return
    parts = [intermediate_slice(32 * blocks, rank, world) for rank in range(world)]
    assert [i for part in parts for i in part] == list(range(32 * blocks))
    assert all(part.start % 32 == 0 and len(part) >= 32 for part in parts)


@pytest.mark.parametrize("rank", [-1, 2])
def test_an_impossible_rank_is_refused(rank: int) -> None:
    with pytest.raises(UsageError):
        intermediate_slice(64, rank, 2)


class Reads:
    """Records which bytes of which file are read, and what the kernel is told to forget."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lock = threading.Lock()
        self.ranges: list[tuple[str, int, int]] = []
        self.forgotten: list[tuple[str, int, int]] = []
        self.threads: set[frozenset[int]] = set()
        preadv, fadvise = os.preadv, os.posix_fadvise

        def reading(fd: int, buffers: Any, offset: int) -> int:
            got = preadv(fd, buffers, offset)
            with self.lock:
                self.ranges.append((os.readlink(f"/proc/self/fd/{fd}"), offset, offset + got))
                self.threads.add(frozenset(os.sched_getaffinity(0)))
            return got

        def advising(fd: int, offset: int, nbytes: int, advice: int) -> None:
            fadvise(fd, offset, nbytes, advice)
            if advice == os.POSIX_FADV_DONTNEED:
                with self.lock:
                    name = os.readlink(f"/proc/self/fd/{fd}")
                    self.forgotten.append((name, offset, offset + nbytes))

        monkeypatch.setattr(expert_reader.os, "preadv", reading)
        monkeypatch.setattr(expert_reader.os, "posix_fadvise", advising)

    def bytes_read(self) -> set[tuple[str, int]]:
        return {(f, i) for f, a, b in self.ranges for i in range(a, b)}


@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_the_rank_owns_is_read(
    family: str, toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(toys[family])
    read = []
    for rank in (0, 1):
        reads = Reads(monkeypatch)
        with tier_for(checkpoint, rank, 2) as tier:
            report = load(checkpoint, tier, rank=rank, world=2, threads=2)
        assert sum(b - a for _, a, b in reads.ranges) == report.file_bytes  # nothing twice
        read.append(reads.bytes_read())
        monkeypatch.undo()
    down_names = [n for n in checkpoint.routed_expert_names() if "down" in n or "w2" in n]
    down = {
        (str(info.file), i)
        for info in (checkpoint.tensors[n] for n in down_names)
        for i in range(info.offset, info.offset + info.nbytes)
    }
    assert read[0] & read[1] <= down  # rows of gate and up have one owner
    assert len(read[0] | read[1]) == checkpoint.expert_bytes


def test_only_the_experts_asked_for_are_read(
    toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(toys["qwen3_moe"])
    reads, key = Reads(monkeypatch), ExpertKey(1, 3)
    with tier_for(checkpoint) as tier:
        load(checkpoint, tier, keys=[key])
        assert list(tier.keys()) == [key]
    assert sum(b - a for _, a, b in reads.ranges) == checkpoint.expert_tensors(*key).nbytes


def test_progress_reaches_the_total(toys: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(toys["gpt_oss"])
    seen: list[Progress] = []
    with tier_for(checkpoint) as tier:
        report = load(checkpoint, tier, progress=seen.append)
    assert seen[-1].done == seen[-1].total == report.file_bytes == checkpoint.expert_bytes
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert seen[-1].rate > 0
    assert seen[-1].remaining == 0


def test_progress_knows_what_is_left() -> None:
    now = Progress(done=25, total=100, seconds=5.0)
    assert (now.rate, now.remaining) == (5.0, 15.0)
    start = Progress(done=0, total=100, seconds=0.0)
    assert (start.rate, start.remaining) == (0.0, None)


@pytest.mark.parametrize(("drop", "told"), [(True, True), (False, False)])
def test_the_cache_is_dropped_when_asked(
    drop: bool, told: bool, toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(toys["qwen3_moe"])
    reads = Reads(monkeypatch)
    with tier_for(checkpoint) as tier:
        assert load(checkpoint, tier, drop_cache=drop).dropped_cache is drop
    assert (sorted(reads.forgotten) == sorted(reads.ranges)) is told


@pytest.mark.parametrize(("available", "drops"), [(10_000, True), (1 << 40, False)])
def test_the_cache_is_dropped_where_memory_is_short(
    available: int, drops: bool, toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(toys["qwen3_moe"])
    with tier_for(checkpoint) as tier:
        memory = type("Memory", (), {"available": available})
        monkeypatch.setattr("moet.hybrid.load.read_memory", lambda: memory)
        assert load(checkpoint, tier).dropped_cache is drops


def test_threads_run_where_they_may(toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(toys["qwen3_moe"])
    cpus, before = sorted(os.sched_getaffinity(0)), os.sched_getaffinity(0)
    reads = Reads(monkeypatch)
    with tier_for(checkpoint) as tier:
        load(checkpoint, tier, cpus=cpus[:1])
    assert reads.threads == {frozenset(cpus[:1])}
    assert os.sched_getaffinity(0) == before


def check_fails(checkpoint: Checkpoint, kind: type[MoetError], **options: Any) -> MoetError:
    """A failing load leaves a tier as it was: with one record from before, and usable."""
    before = ExpertKey(99, 0)
    with RamTier(tier_bytes(checkpoint.geometry) + 4096, populate=False) as tier:
        tier.put(before, np.arange(100, dtype=np.uint8))
        with pytest.raises(kind) as caught:
            load(checkpoint, tier, **options)
        assert caught.value.hint
        assert list(tier.keys()) == [before]
        stats = tier.stats()
        assert (stats.used, stats.leases) == (4096, 0)
        with tier.acquire(before) as lease:
            assert lease.view().tolist() == list(range(100))
    return caught.value


def changed(family: str, to: Path, change: Callable[[bytearray, Checkpoint], None]) -> Checkpoint:
    """A one-file checkpoint with changed bytes, opened before the change."""
    write_toy_checkpoint(to, family, **SIZES)
    checkpoint = open_checkpoint(to)
    file = to / "model.safetensors"
    content = bytearray(file.read_bytes())
    change(content, checkpoint)
    file.write_bytes(content)
    return checkpoint


NAMED = {
    "qwen3_moe": {
        "gate": r"model\.layers\.1\.mlp\.experts\.4\.gate_proj\.weight_scale\[70, 2\]",
        "up": r"model\.layers\.1\.mlp\.experts\.4\.up_proj\.weight_scale\[70, 2\]",
        "down": r"model\.layers\.1\.mlp\.experts\.4\.down_proj\.weight_scale\[70, 2\]",
    },
    "deepseek_v4": {
        "gate": r"layers\.1\.ffn\.experts\.4\.w1\.scale\[70, 2\]",
        "up": r"layers\.1\.ffn\.experts\.4\.w3\.scale\[70, 2\]",
        "down": r"layers\.1\.ffn\.experts\.4\.w2\.scale\[70, 2\]",
    },
    "gpt_oss": {
        "gate": r"model\.layers\.1\.mlp\.experts\.gate_up_proj_scales\[4, 140, 2\]",
        "up": r"model\.layers\.1\.mlp\.experts\.gate_up_proj_scales\[4, 141, 2\]",
        "down": r"model\.layers\.1\.mlp\.experts\.down_proj_scales\[4, 70, 2\]",
    },
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("matrix", ["gate", "up", "down"])
def test_a_reserved_scale_is_named(family: str, matrix: str, tmp_path: Path) -> None:
    def spoil(content: bytearray, checkpoint: Checkpoint) -> None:
        span = getattr(checkpoint.expert_tensors(1, 4), matrix).scales
        content[span.offset + 70 * span.step + 2] = 255

    checkpoint, named = changed(family, tmp_path / "x", spoil), NAMED[family][matrix]
    assert re.search(named + r" is the scale byte 255", str(check_fails(checkpoint, FormatError)))
    # row 70 of gate and up, block 2 of down: all belong to rank 1 of 2
    with tier_for(checkpoint, 0, 2) as tier:
        load(checkpoint, tier, rank=0, world=2)
    with tier_for(checkpoint, 1, 2) as tier, pytest.raises(FormatError, match=named):
        load(checkpoint, tier, rank=1, world=2)


def test_a_file_that_was_cut_after_opening_is_named(tmp_path: Path) -> None:
    def cut(content: bytearray, checkpoint: Checkpoint) -> None:
        span = checkpoint.expert_tensors(1, 5).up.codes
        del content[span.offset + 10 :]

    error = check_fails(changed("qwen3_moe", tmp_path / "x", cut), BrokenCheckpoint)
    assert isinstance(error, BrokenCheckpoint)
    assert error.fault is Fault.TRUNCATED


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    write_toy_checkpoint(tmp_path / "x")
    checkpoint = open_checkpoint(tmp_path / "x")
    (tmp_path / "x" / "model.safetensors").unlink()
    error = check_fails(checkpoint, BrokenCheckpoint)
    assert isinstance(error, BrokenCheckpoint)
    assert error.fault is Fault.UNREADABLE


def test_a_read_error_of_the_disk_is_named(
    toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(expert_reader.os, "preadv", failing)
    error = check_fails(open_checkpoint(toys["qwen3_moe"]), BrokenCheckpoint)
    assert "Input/output error" in str(error)


def test_short_reads_are_continued(toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(
        expert_reader.os, "preadv", lambda fd, bufs, at: preadv(fd, [bufs[0][:701]], at)
    )
    check_records(open_checkpoint(toys["gpt_oss"]), toy_model("gpt_oss", **SIZES), 0, 1)


def test_a_tier_that_is_too_small_is_left_empty(toys: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(toys["qwen3_moe"])
    with RamTier(tier_bytes(checkpoint.geometry) // 2, populate=False) as tier:
        with pytest.raises(TierError, match="no room"):
            load(checkpoint, tier)
        assert tier.stats().used == 0


@pytest.mark.parametrize("n", [1, 5, 12])
def test_a_failing_tier_is_rolled_back(n: int, toys: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(toys["qwen3_moe"])
    with tier_for(checkpoint) as inner:
        tier = FaultyTier(inner, fail_nth("reserve", n))
        with pytest.raises(TierError, match="on purpose"):
            load(checkpoint, tier, threads=3)
        assert inner.stats().used == 0
        load(checkpoint, tier)  # and works when asked again
        assert inner.stats().records == 12


def test_an_interrupt_rolls_back(toys: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(toys["qwen3_moe"])

    def interrupt(now: Progress) -> None:
        raise KeyboardInterrupt

    with tier_for(checkpoint) as tier:
        with pytest.raises(KeyboardInterrupt):
            load(checkpoint, tier, progress=interrupt)
        assert tier.stats().used == 0


def test_cpus_that_are_not_there_are_named(toys: dict[str, Path]) -> None:
    error = check_fails(open_checkpoint(toys["qwen3_moe"]), MachineError, cpus=[100_000])
    assert "100000" in str(error)


def test_files_are_closed(toys: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(toys["qwen3_moe"])
    before = len(os.listdir("/proc/self/fd"))
    with tier_for(checkpoint) as tier:
        load(checkpoint, tier)
    assert len(os.listdir("/proc/self/fd")) == before


def test_scratch_memory_is_a_band_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden": 1024, "intermediate": 1024, "experts": 16, "layers": 1, "vocab": 32}
    write_toy_checkpoint(tmp_path / "x", **sizes)
    checkpoint = open_checkpoint(tmp_path / "x")
    band, threads = 1 << 16, 3
    monkeypatch.setattr(expert_reader, "_BAND_BYTES", band)
    with tier_for(checkpoint) as tier:
        tracemalloc.start()
        try:
            load(checkpoint, tier, threads=threads)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < threads * 2.5 * band + 300_000  # gate and up at once, their scales
    assert peak < checkpoint.expert_tensors(0, 0).nbytes
