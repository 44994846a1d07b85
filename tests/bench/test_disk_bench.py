"""The disk bench: what it measures is there and adds up, and nothing is left. Never a speed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from moet import _core
from moet.base.errors import TierError, UsageError
from moet.bench import disk
from moet.bench.disk import Options, run
from moet.bench.disk_table import render
from moet.bench.record import Record

KIB, MIB = 1 << 10, 1 << 20


def options(target: Path, **more: object) -> Options:
    small: dict[str, object] = {
        "target": target,
        "record_bytes": 64 * KIB,
        "depths": (1, 3),
        "file_bytes": 2 * MIB,
        "seconds": 0.01,
        "turns": 2,
        "queue_depth": 4,
        "piece": 16 * KIB,
    }
    return Options(**{**small, **more})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    folder = tmp_path_factory.mktemp("disk")
    told: list[tuple[str, float]] = []
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    made = run(options(folder), lambda what, share: told.append((what, share)))
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before
    assert {"sequential", "writing a file to read", "checksums always"} <= {w for w, _ in told}
    assert all(0 <= share < 1 for _, share in told)
    assert list(folder.iterdir()) == [], "the file that was written is gone"
    return made


def test_every_cell_is_measured_and_adds_up(record: Record) -> None:
    ways = ["threads"] if _core.probe_uring() else ["io_uring", "threads"]
    reads = record.rows("read")
    assert [(r["who"], r["depth"]) for r in reads] == [(w, d) for w in ways for d in (1, 3)]
    (in_order,) = record.rows("sequential")
    for row in [*reads, *record.rows("tier")]:
        assert row["gb_s_min"] <= row["gb_s"] <= row["gb_s_max"]
        assert row["of_sequential"] == pytest.approx(row["gb_s"] / in_order["gb_s"])
        assert 0 < row["median_ms"] <= row["p95_ms"]
        assert row["records"] >= 2 * row["depth"]
    assert [r["who"] for r in record.rows("tier")] == ["checksums never", "checksums always"]
    (checksum,) = record.rows("checksum")
    assert checksum["gb_s"] > 0


def test_the_record_says_what_was_measured(record: Record) -> None:
    assert record.setup["file_bytes"] == 2 * MIB
    assert record.setup["record_bytes"] == 64 * KIB
    assert record.setup["filesystem"] != "unknown"
    assert any("threads" in fact for fact in record.setup["findings"])
    assert Record.from_json(record.to_json()).results == json.loads(record.to_json())["results"]


def test_the_table_has_a_line_for_each(record: Record) -> None:
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render(record))
    text = console.export_text()
    console.file.close()
    for words in ("in order", "threads", "checksums always", "xxh3-64", "64.00 KiB"):
        assert words in text


def test_a_file_is_measured_as_it_is_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = np.random.default_rng(0).integers(0, 256, MIB + 100, np.uint8)
    data.tofile(path)
    made = run(options(path, mode="threads", turns=1), lambda what, share: None)
    assert {row["who"] for row in made.rows("read")} == {"threads"}
    assert np.array_equal(np.fromfile(path, np.uint8), data)


def test_what_cannot_be_measured_is_named(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.write_bytes(bytes(100 * KIB))
    for target, words in [(tmp_path / "none", "neither"), (small, "less than two records")]:
        with pytest.raises(UsageError, match=words) as caught:
            run(options(target), lambda what, share: None)
        assert caught.value.hint
    with pytest.raises(TierError, match="are free") as full:
        run(options(tmp_path, file_bytes=1 << 60), lambda what, share: None)
    assert "--size" in full.value.hint


@pytest.mark.parametrize(
    "wrong",
    [
        {"record_bytes": 1000},
        {"record_bytes": 0},
        {"depths": ()},
        {"depths": (0,)},
        {"depths": (1, 65)},
        {"turns": 0},
        {"seconds": 0.0},
        {"mode": "fast"},
    ],
)
def test_odd_options_are_refused(wrong: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        options(tmp_path, **wrong)
    assert caught.value.hint


def test_every_record_comes_once_before_any_comes_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    bench = disk.Bench(options(path), path)
    with bench.stack:
        seen = [bench._next_record(0) for _ in range(2 * bench.records)]
    assert sorted(seen[:16]) == sorted(seen[16:]) == list(range(16))
