"""The CPU bench: what it measures is there and adds up, peers that fail say so. Never a speed."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from moet.base.errors import KernelError, MachineError, UsageError
from moet.bench import cpu, peer_engines, peers, timing
from moet.bench.busy import busy_processes
from moet.bench.cpu import Options, run
from moet.bench.peer_engines import Ggml, Weights
from moet.bench.record import Record, make_record, source_commit
from moet.bench.render import render
from moet.bench.rig import Rig, Shape, Work, bill, random_work, random_x
from moet.bench.timing import Sample, believable, median, percentile, pinned, timed
from moet.formats.mxint import ActFormat
from moet.formats.tiling import read_expert
from moet.kernels import reference
from moet.kernels.cpu import Pool, default_cpus
from moet.kernels.rounding import round_output, widen_bf16
from moet.kernels.spec import DType

SMALL = Shape(hidden=128, intermediate=96, experts=8, top_k=3)
MIB = 1 << 20


@pytest.fixture(scope="module")
def record() -> Record:
    told: list[tuple[str, float]] = []
    options = Options(
        shape=SMALL,
        tokens=(1, 4),
        threads=(1, 2),
        samples=5,
        busy=1,
        busy_steps=8,
        peers=(),
        read_bytes=4 * MIB,
    )
    made = run(options, lambda what, share: told.append((what, share)))
    assert {what for what, _ in told} >= {"experts", "2 threads, 4 tokens"}
    assert all(0 <= share <= 1 for _, share in told)
    return made


def test_every_cell_is_measured_and_adds_up(record: Record) -> None:
    speed = record.rows("speed")
    cells = {(r["who"], r["threads"], r["tokens"]) for r in speed}
    who = ("moet mxint8", "moet mxint16")
    assert cells == {(w, n, t) for w in who for n in (1, 2) for t in (1, 4)}
    expert_bytes = SMALL.spec(ActFormat.MXINT8).layout.payload_bytes
    for row in speed:
        touched = 3 if row["tokens"] == 1 else 8 * (1 - (5 / 8) ** 4)
        assert row["experts"] == pytest.approx(touched)
        assert row["gb_s"] == pytest.approx(touched * expert_bytes / row["us"] * 1e-3)
        assert row["ratio"] == pytest.approx(row["gb_s"] / row["read_gb_s"])
        assert row["samples"] >= 5
        assert 0 <= row["quiet"] <= row["samples"]


def test_busy_rows_compare_with_the_same_steps_alone(record: Record) -> None:
    busy = record.rows("busy")
    assert len(busy) == 4
    for row in busy:
        assert row["processes"] == 1
        assert row["steps"] == 8
        assert row["median_slowdown"] == pytest.approx(
            row["busy_median_us"] / row["alone_median_us"]
        )
        assert row["alone_p95_us"] >= row["alone_median_us"]


def test_a_record_survives_json(record: Record) -> None:
    again = Record.from_json(record.to_json())
    assert again.to_json() == record.to_json()
    assert again.results == record.results
    assert again.setup["shape"]["hidden"] == 128
    assert again.machine["cpu"]["usable"]
    for text in ("nonsense", "{}", '{"bench": "cpu"}', "[]"):
        with pytest.raises(UsageError, match="not a bench record"):
            Record.from_json(text)


def test_the_tables_show_every_row(record: Record) -> None:
    peer = {"who": "other", "threads": 1, "version": "9", "relative_error": 0.5, "kind": "peer"}
    rows = [*record.results, peer | {"same_layer": False}]
    console = Console(width=200, file=io.StringIO())
    console.print(render(make_record("cpu", record.setup, rows)))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count("moet mxint8") == 6
    assert "beside 1 busy processes" in text
    assert "NOT the same layer" in text


def test_a_record_names_the_commit_only_of_a_checkout(tmp_path: Any) -> None:
    assert source_commit(tmp_path) == ""


def test_the_rig_computes_the_layer() -> None:
    rig = Rig(SMALL, 4, 1, MIB)
    layer = rig.layer(ActFormat.MXINT8, Pool(2))
    work = rig.work(4)
    rig.step(layer, work)()
    spec = layer.spec
    size = spec.layout.record_bytes
    experts = {
        e: read_expert(spec.layout, rig.arena.bytes[e * size : (e + 1) * size].copy())
        for e in range(spec.experts)
    }
    want = reference.moe_layer(spec, widen_bf16(rig.x), work.ids, work.weights, experts)
    assert rig.out.tobytes() == round_output(want, DType.BF16).tobytes()
    assert work.touched == len(set(work.ids.ravel().tolist()))
    assert all(len(set(row)) == 3 for row in work.ids.tolist())


@pytest.mark.parametrize(
    "wrong", [{"tokens": (0,)}, {"threads": (0,)}, {"samples": 0}, {"busy": -1}, {"acts": ()}]
)
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="1 or more"):
        Options(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": (70_000,)}, "70000 tokens; 65535 at most"),
        ({"busy": 100_000}, "100000 busy processes"),
        ({"samples": 10**20}, "samples; 100000 at most"),
    ],
)
def test_too_much_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Options(**wrong)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hidden": 0}, "hidden size 0"),
        ({"hidden": 48}, "hidden size 48 has no whole blocks of 32"),
        ({"intermediate": -32}, "intermediate size -32"),
        ({"hidden": 1 << 30}, "hidden size 1073741824"),
        ({"experts": 4}, "top-6 of 4 experts"),
        ({"top_k": 0}, "top-0"),
        ({"experts": 1 << 30}, "experts"),
    ],
)
def test_layers_that_there_are_not(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Shape(**wrong)
    assert caught.value.hint


def test_the_memory_bill_comes_before_the_memory() -> None:
    parts = bill(SMALL, 1000, MIB)
    assert parts["experts"] == max(MIB, 8 * SMALL.spec(ActFormat.MXINT8).layout.record_bytes)
    assert parts["1000 tokens"] > 1000 * 128 * 16
    with pytest.raises(MachineError, match=r"not enough memory: .*experts .*, 65535 tokens "):
        Rig(Shape(hidden=1 << 20, intermediate=1 << 15, experts=512, top_k=6), 65_535, 0)


def test_more_threads_than_cpus_are_refused() -> None:
    with pytest.raises(UsageError, match=r"99999 threads on \d+ CPU"):
        run(Options(shape=SMALL, threads=(1, 99_999), peers=(), read_bytes=MIB))


def test_one_sample_on_a_busy_machine_is_still_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_preemptions", itertools.count().__next__)
    options = Options(shape=SMALL, tokens=(1,), threads=(1,), samples=1, peers=(), read_bytes=MIB)
    monkeypatch.setattr(cpu.time, "monotonic", itertools.count(0, 100).__next__)
    rows = run(options).rows("speed")
    assert all(row["quiet"] == 0 and row["ratio"] > 0 for row in rows)


def test_records_are_json_that_everybody_reads() -> None:
    row = {"kind": "speed", "ratio": math.nan, "list": [math.inf, 1.5]}
    text = make_record("cpu", {"seed": 0}, [row]).to_json()
    assert json.loads(text, parse_constant=pytest.fail)["results"] == [
        {"kind": "speed", "ratio": None, "list": [None, 1.5]}
    ]


def test_a_peer_that_is_not_installed_is_refused() -> None:
    with pytest.raises(UsageError, match="llamafile") as caught:
        Options(peers=("llamafile",))
    assert "installed here" in caught.value.hint


@pytest.mark.parametrize("name", sorted(set(peer_engines.ENGINES) - set(peers.installed())))
def test_a_peer_that_cannot_start_says_why(name: str) -> None:
    module = peer_engines.ENGINES[name][0]
    with pytest.raises(KernelError, match=rf"{name} ended with code 1: .*{module}"):
        peers.Peer(name, SMALL, 1, 1)


class Honest:
    """An engine that computes the layer in fp32."""

    version = "1"

    def __init__(self, weights: Weights, factor: float) -> None:
        self._weights = weights
        self._factor = factor
        self.steps: list[int] = []

    def step(self, x: NDArray[np.uint16], work: Work) -> Callable[[], object]:
        def call() -> None:
            self.steps.append(len(x))
            self._out = self._weights.layer(widen_bf16(x), work) * self._factor

        return call

    def output(self) -> NDArray[np.float32]:
        return self._out


@pytest.mark.parametrize("factor", [1, 1.5])
def test_the_child_tells_its_error_and_answers_requests(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Honest] = []

    def engine(shape: Shape, weights: Weights, threads: int, max_tokens: int) -> Honest:
        made.append(Honest(weights, factor))
        return made[0]

    monkeypatch.setitem(peer_engines.ENGINES, "honest", ("numpy", engine))
    shape = {"hidden": 128, "intermediate": 96, "experts": 8, "top_k": 3}
    setup = {"name": "honest", "shape": shape, "threads": 1, "max_tokens": 4}
    answers = io.StringIO()
    peers.serve(setup, io.StringIO("[1, 2]\n[4, 3]\n"), answers)
    hello, first, second = map(json.loads, answers.getvalue().splitlines())
    assert hello["error"] == pytest.approx(factor - 1, abs=1e-6)
    assert (hello["error"] < peers.ERROR_LIMIT) == (factor == 1)
    assert (len(first["samples"]), len(second["samples"])) == (2, 3)
    assert made[0].steps == [2, 1, 1, 1, 4, 4, 4, 4]  # each request wakes the engine up first


@pytest.mark.parametrize("name", peer_engines.ENGINES)
def test_an_installed_peer_computes_the_same_layer(name: str) -> None:
    if name not in peers.installed():
        pytest.skip(f"{name} is not installed (module {peer_engines.ENGINES[name][0]})")
    with peers.Peer(name, Shape(hidden=512, intermediate=256, experts=8, top_k=2), 1, 4) as peer:
        assert peer.error < peers.ERROR_LIMIT
        assert len(peer.samples(4, 3)) == 3


def test_random_weights_of_peers_are_a_real_layer() -> None:
    weights = Weights.random(SMALL, 3)
    rng = np.random.default_rng(4)
    x = widen_bf16(random_x(rng, 2, 128))
    out = weights.layer(x, random_work(rng, 2, SMALL))
    assert out.shape == (2, 128)
    assert np.isfinite(out).all()
    assert out.any()
    assert Ggml is peer_engines.ENGINES["ggml"][1]


def test_busy_processes_end_with_the_block() -> None:
    cpus = default_cpus()
    with pinned(cpus[0]), busy_processes(2, cpus) as pids:
        assert [os.sched_getaffinity(pid) for pid in pids] == [set(cpus)] * 2
        states = [_state(pid) for pid in pids]
        assert set(states) <= {"R"}
    assert [_state(pid) for pid in pids] == ["", ""]


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def test_statistics() -> None:
    assert median([3, 1, 2]) == 2
    assert math.isnan(median([]))
    assert percentile([float(i) for i in range(1, 101)], 95) == 95
    assert percentile([7.0], 95) == 7
    quiet = [Sample(1, True)] * 3
    noisy = [Sample(2, False)] * 5
    assert believable([*quiet, *noisy], 3) == quiet
    assert len(believable([*quiet, *noisy], 4)) == 8
    assert timed(lambda: None).seconds < 60
