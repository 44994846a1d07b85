"""Routing traces: recorded, read back, made; and every way in which a file is none."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moet.base.errors import UsageError
from moet.checkpoint import open_checkpoint
from moet.checkpoint.geometry import ModelGeometry
from moet.hybrid.trace import Call, TraceRecorder, count_heat, read_trace, steps
from moet.hybrid.trace_synthetic import Synthetic, make_trace
from moet.testing.toy import write_toy_checkpoint

HEADER = {"format": "moet-trace-1", "model": {"moe_layers": [1, 2], "experts": 4, "top_k": 2}}


@pytest.fixture(scope="module")
def geometry(tmp_path_factory: pytest.TempPathFactory) -> ModelGeometry:
    path = tmp_path_factory.mktemp("toy")
    write_toy_checkpoint(path, experts=6, layers=2, top_k=2)
    return open_checkpoint(path).geometry


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_what_is_recorded_reads_back(geometry: ModelGeometry, tmp_path: Path, name: str) -> None:
    with TraceRecorder(tmp_path / name, geometry) as recorder:
        recorder.watch(0, np.array([[5, 1], [1, -1]], np.int32), False)
        recorder.watch(1, np.array([[2, 3]], np.int32), True)
        recorder.watch(
            0, np.array([[0, 1], [1, 4], [-1, -1]], np.int32), np.array([True, False, True])
        )
    recorder.watch(1, np.array([[0, 1]], np.int32), False)  # closed: no more is noted
    trace = read_trace(tmp_path / name)
    assert trace[:3] == ((0, 1), 6, 2)
    assert trace.calls == [
        Call(0, 2, (1, 5)),
        Call(1, 1, (), (2, 3)),
        Call(0, 3, (1, 4), (0,)),
    ]
    assert [len(step) for step in steps(trace.calls)] == [2, 1]
    assert count_heat(trace, trace.calls).tolist() == [[0, 2, 0, 0, 1, 1], [0] * 6]
    if name.endswith(".gz"):
        assert gzip.decompress((tmp_path / name).read_bytes()).startswith(b'{"format"')


def test_a_recorder_stops_after_so_many_calls(geometry: ModelGeometry, tmp_path: Path) -> None:
    with TraceRecorder(tmp_path / "t", geometry, most_calls=2) as recorder:
        for _ in range(5):
            recorder.watch(0, np.array([[1, 2]], np.int32), False)
    assert recorder.calls == len(read_trace(tmp_path / "t").calls) == 2


def test_a_recorder_overwrites_nothing(geometry: ModelGeometry, tmp_path: Path) -> None:
    (tmp_path / "t").write_text("mine")
    for path in (tmp_path / "t", tmp_path / "no" / "t"):
        with pytest.raises(UsageError, match="cannot be written") as caught:
            TraceRecorder(path, geometry)
        assert caught.value.hint
    assert (tmp_path / "t").read_text() == "mine"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "line 1: not JSON"),
        (["[]"], "not a trace of format"),
        ([{"format": "moet-trace-2"}], "not a trace of format"),
        ([{**HEADER, "model": 3}], "moe_layers None"),
        ([{**HEADER, "model": {**HEADER["model"], "moe_layers": [2, 1]}}], "are no layers"),  # type: ignore[dict-item]
        ([{**HEADER, "model": {**HEADER["model"], "top_k": 5}}], "cannot be"),  # type: ignore[dict-item]
        ([{**HEADER, "model": {**HEADER["model"], "experts": True}}], "cannot be"),  # type: ignore[dict-item]
        ([HEADER], "has no calls"),
        ([HEADER, "{"], "line 2: not JSON"),
        ([HEADER, [1, 1, [0], []], [3, 1, [0], []]], "line 3 is no call"),
        ([HEADER, [1, 1, [4], []]], "line 2 is no call"),
        ([HEADER, [1, 1, [0], [0]]], "line 2 is no call"),
        ([HEADER, [1, 1, [0, 0], []]], "line 2 is no call"),
        ([HEADER, [1, -1, [0], []]], "line 2 is no call"),
        ([HEADER, [1, 1, [0]]], "line 2 is no call"),
        ([HEADER, [1, 1, [0.0], []]], "line 2 is no call"),
        ([HEADER, [1, 1, 0, []]], "line 2 is no call"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, lines: list[Any], message: str) -> None:
    path = tmp_path / "t"
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    with pytest.raises(UsageError, match=message) as caught:
        read_trace(path)
    assert caught.value.hint


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(json.dumps(HEADER).encode() * 99)[:-20])
    (tmp_path / "plain.gz").write_text("{}")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("missing", "cut.gz", "plain.gz", "binary"):
        with pytest.raises(UsageError, match=name):
            read_trace(tmp_path / name)


def test_made_traces_are_like_their_description() -> None:
    like = Synthetic(layers=3, experts=32, top_k=4, steps=50, prompt_every=20, prompt_tokens=64)
    trace = make_trace(like)
    assert trace == make_trace(like), "the same seed makes the same trace"
    prefills = [call for call in trace.calls if not call.decode]
    assert len(prefills) == 2 * 3
    assert all(call.tokens == 64 and len(call.prefill) > 20 for call in prefills)
    decodes = [call for call in trace.calls if call.decode]
    assert all(len(call.decode) == 4 and not call.prefill for call in decodes)
    assert len(list(steps(trace.calls))) == 52
    assert all(a.layer < b.layer for step in steps(trace.calls) for a, b in pairwise(step))


def test_zipf_and_drift_are_what_they_say() -> None:
    """The most wanted experts stay so without drift, and trade places with it."""
    overlaps = []
    for drift in (0.0, 20.0):
        trace = make_trace(
            Synthetic(layers=1, experts=64, top_k=1, steps=3000, drift=drift, prompt_every=0)
        )
        halves = [count_heat(trace, part)[0] for part in (trace.calls[:1500], trace.calls[1500:])]
        hottest = [set(np.argsort(-half)[:8].tolist()) for half in halves]
        overlaps.append(len(hottest[0] & hottest[1]))
        if not drift:
            counts = np.sort(sum(halves))[::-1]
            assert counts[0] / counts[9] == pytest.approx(10, rel=0.35), "rank^-1"
    assert overlaps[0] >= 7
    assert overlaps[1] <= 4


@pytest.mark.parametrize(
    "odd", [{"layers": 0}, {"top_k": 129}, {"zipf": -1.0}, {"drift": float("nan")}, {"seed": -1}]
)
def test_traces_that_cannot_be_made(odd: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(odd))) as caught:
        Synthetic(**odd)
    assert caught.value.hint
