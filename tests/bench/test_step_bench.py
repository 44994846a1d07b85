"""The benches of card and hybrid step, on the stand-in for a card: they run, and their figures add
up. Never a speed."""

from __future__ import annotations

import ctypes
import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tests.kernels.cuda_host.emulator import HostGpu, HostLink, build_library, instant_card

from moet.base.errors import UsageError
from moet.bench import moe, moe_gpu, step, step_rig
from moet.bench.record import Record, Row
from moet.bench.render_gpu import render_moe, render_step
from moet.bench.step_rig import draw_calls, draw_ids, resident_count, tiny
from moet.formats.mxint import ActFormat
from moet.hybrid.mailbox import Variant
from moet.kernels.cpu import Pool
from moet.kernels.cuda.opened import OpenedCard
from moet.kernels.spec import LayerSpec
from moet.machine.cpu import usable_threads

RECORDS = Path(__file__).parents[2] / "benchmarks/records"
SPEC = LayerSpec(hidden=64, intermediate=32, experts=12, top_k=3, act=ActFormat.MXINT8)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_library(tmp_path_factory.mktemp("step_bench"))


@pytest.fixture
def gpu(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> HostGpu:
    monkeypatch.setattr(moe_gpu, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(moe_gpu, "STEPS", 2)
    monkeypatch.setattr(moe_gpu, "REPEATS", 1)
    return HostGpu(library)


@pytest.mark.parametrize("percent", [0, 10, 25, 50, 75, 90, 100])
@pytest.mark.parametrize("spec", [SPEC, moe_gpu.V41_FLASH])
def test_the_stated_share_of_routings_is_of_experts_on_the_card(
    spec: LayerSpec, percent: int
) -> None:
    rng = np.random.default_rng(percent)
    resident = resident_count(spec, percent)
    ids = np.concatenate([draw_ids(rng, spec, tokens, percent) for tokens in [1] * 400 + [7] * 60])
    assert all(len(set(row)) == spec.top_k for row in ids.tolist())
    assert ids.min() >= 0
    assert ids.max() < spec.experts
    assert abs((ids < resident).mean() - percent / 100) < 0.03
    assert {0: resident == 0, 100: resident == spec.experts}.get(percent, True)


def test_what_the_cpu_is_asked_for_is_what_is_not_on_the_card() -> None:
    rng = np.random.default_rng(0)
    calls = draw_calls(rng, SPEC, count=5, layers=2, tokens=4, percent=50)
    assert calls.ids.shape == calls.asked.shape == (5, 2, 4, 3)
    asked = calls.asked >= 0
    np.testing.assert_array_equal(calls.asked[asked], calls.ids[asked])
    assert (calls.ids[~asked] < resident_count(SPEC, 50)).all()
    assert calls.on_card == pytest.approx((~asked).mean())
    assert 1 <= calls.cpu_experts <= 12
    assert 1 <= calls.card_experts <= 12


def test_the_layer_that_costs_nothing_has_the_same_mail() -> None:
    small = tiny(moe_gpu.V41_FLASH)
    assert (small.hidden, small.top_k, small.rows_bf16) == (5120, 6, True)
    assert 30 * small.layout.record_bytes < moe_gpu.V41_FLASH.layout.record_bytes


def test_the_step_bench_measures_every_row(gpu: HostGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_rig, "ROUND_TRIPS", 2)
    monkeypatch.setattr(step, "WARM_UP", 1)
    memory = instant_card()
    card = OpenedCard(gpu=gpu, link=HostLink(gpu), memory=memory)  # type: ignore[arg-type]
    options = step.Options(
        spec=SPEC, layers=2, tokens=(2,), percents=(0, 50, 100),
        variants=(Variant.POLL, Variant.HOSTFUNC), replays=2, cpu_passes=1, stall_seconds=30,
        read_bytes=4 << 20,
    )  # fmt: skip
    told: list[float] = []
    record = step.run(card, Pool(2), options, lambda what, share: told.append(share))
    assert gpu.held == {}
    assert memory.left == (0, 0, 0)
    memory.close()
    rows = record.rows("step")
    assert len(rows) == 2 * 3
    assert all(0 <= share <= 1 for share in told)
    for row in rows:
        assert row["on_card"] == pytest.approx(row["percent"] / 100, abs=0.2)
        assert row["ratio"] == pytest.approx(row["step_us"] / row["limit_us"])
        assert row["holds"] == (row["ratio"] <= 1)
        assert (row["cpu_read_gb_s"] > 0) == (row["cpu_read_share"] > 0) == (row["percent"] < 100)
        assert row["extrapolated_ms"] == pytest.approx(row["step_us"] * 0.04)
        assert (row["cpu_us"] == 0) == (row["percent"] == 100)
        assert (row["cpu_in_step_us"] > 0) == (row["percent"] < 100)
        assert (row["card_experts"] > 0) == (row["percent"] > 0)
        assert row["step_p95_us"] >= row["step_us"] > 0
    assert record.setup["distinct_experts"] == 24
    assert (record.setup["threads"], record.setup["cores"]) == (2, usable_threads())
    again = Record.from_json(record.to_json())
    text = io.StringIO()
    Console(file=text, width=200).print(render_step(again))
    assert "extrapolated: 40 layers" in text.getvalue()
    assert "hostfunc: us a layer" in text.getvalue()


TIMES: Row = {"step_us": 107.0, "round_trip_us": 12.0, "cpu_in_round_trip_us": 10.0}


@pytest.mark.parametrize(
    ("times", "limit"),
    [
        ({"card_us": 40.0, "cpu_us": 100.0, "cpu_experts": 3.0}, 105.0 + 2.0 + 5.0),
        ({"card_us": 100.0, "cpu_us": 40.0, "cpu_experts": 3.0}, 105.0 + 2.0 + 5.0),
        ({"card_us": 100.0, "cpu_us": 0.0, "cpu_experts": 0.0}, 105.0 + 5.0),
        ({"card_us": 90.0, "cpu_us": 0.0, "cpu_experts": 0.0}, 94.5 + 5.0),
    ],
)
def test_the_limit_counts_the_cpus_compute_once_and_mail_only_where_there_is_any(
    times: Row, limit: float
) -> None:
    judged = step.judged(TIMES | times)
    assert judged["limit_us"] == pytest.approx(limit)
    assert judged["ratio"] == pytest.approx(107 / limit)
    assert judged["holds"] == (limit >= 107)
    assert judged["wait_us"] == 107 - times["card_us"]


@pytest.mark.parametrize("name", ["hybrid-step", "hybrid-step-variants"])
def test_recorded_rows_are_judged_by_the_same_rule(name: str) -> None:
    record = Record.from_json((RECORDS / f"{name}.json").read_text())
    assert record.rows("step")
    for row in record.rows("step"):
        assert row == row | step.judged(row)


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": ()}, {"tokens": (0,)}, {"tokens": (65,)}, {"percents": (101,)}, {"replays": 0}],
)
def test_what_cannot_be_measured_is_refused(wrong: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(UsageError):
        step.Options(**wrong)  # type: ignore[arg-type]


def test_a_layer_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(UsageError, match="5 experts of which a token takes 3"):
        step.Options(spec=LayerSpec(hidden=64, intermediate=32, experts=5, top_k=3, act=SPEC.act))


# ---- the kernels alone

OTHERS = {
    "hidden": 64, "intermediate": 32, "experts": 12, "top_k": 3,
    "results": [{"who": "A", "tokens": 2, "us": 5e6}, {"who": "A", "tokens": 9, "us": 1.0}],
}  # fmt: skip


def test_the_kernels_bench_joins_others_by_tokens(gpu: HostGpu, tmp_path: Path) -> None:
    shapes = {"small": SPEC}
    file = tmp_path / "others.json"
    file.write_text(json.dumps(OTHERS))
    others = moe.read_others(file, shapes)
    record = moe.run(
        gpu,  # type: ignore[arg-type]
        moe.Options(shapes=shapes, tokens=(1, 2), launches=True, others=others),
    )
    assert gpu.held == {}
    assert len(record.rows("gpu")) == 2 * 5
    (beside,) = record.rows("other")
    assert (beside["who"], beside["tokens"]) == ("A", 2)
    assert beside["times_as_fast"] == pytest.approx(5e6 / beside["moet_us"])
    assert {row["name"] for row in record.rows("kernel")} == {
        "moet_quantise", "moet_gate_up_8", "moet_down_8", "moet_combine",
    }  # fmt: skip
    text = io.StringIO()
    Console(file=text, width=200).print(render_moe(record))
    assert "others, same card" in text.getvalue()


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": 32},
        {"results": [{"who": "A"}]},
        {"results": [{"who": "A", "tokens": 1, "us": 0}]},
    ],
)
def test_others_of_another_layer_or_format_are_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    file = tmp_path / "others.json"
    file.write_text(json.dumps(OTHERS | change))
    with pytest.raises(UsageError, match=r"others\.json"):
        moe.read_others(file, {"small": SPEC})
