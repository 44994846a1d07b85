"""The error tables: the formats they compare are what they say, and the page is their record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from moet.formats.mxint import ActFormat, quantise
from moet.testing.toy import write_toy_checkpoint

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import error_tables

    return error_tables


@pytest.fixture
def formats(tables: ModuleType) -> dict:
    return tables.FORMATS


def e4m3_values() -> np.ndarray:
    codes = np.arange(127)  # 0x7F is NaN
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * np.ldexp(1.0, exponent - 10)
    )


def test_e4m3_rounding_is_the_nearest_of_all_codes(tables: ModuleType) -> None:
    values = e4m3_values()
    assert values[-1] == 448
    middles = (values[1:] + values[:-1]) / 2
    x = np.concatenate((values, middles, middles * 1.001, middles * 0.999, [500, 1e9]))
    distance = np.abs(values - x[:, None])
    nearest = distance == distance.min(axis=1, keepdims=True)
    even = nearest & (np.arange(127) % 2 == 0)
    index = np.where(even.any(axis=1), even.argmax(axis=1), nearest.argmax(axis=1))
    round_e4m3 = sys.modules["activation_formats"].round_e4m3
    assert (round_e4m3(x) == values[index]).all()
    assert (round_e4m3(-x) == -values[index]).all()


def test_mxfp8_scales_ceil_never_saturates_and_floor_does(formats: dict) -> None:
    x = np.zeros((1, 64))
    x[0, :2], x[0, 32] = [511, 448], 448
    assert formats["MXFP8 floor"](x)[0, 0] == 448
    assert formats["MXFP8 ceil"](x)[0, 0] == 512
    assert formats["MXFP8 ceil"](x)[0, 32] == formats["MXFP8 floor"](x)[0, 32] == 448


def test_every_format_keeps_shape_zero_and_relative_size(formats: dict) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 200)).astype(np.float32).astype(float)
    x[:, ::9] = 0
    for name, convert in formats.items():
        y = convert(x)
        assert y.shape == x.shape, name
        assert (y[x == 0] == 0).all(), name
        assert np.allclose(convert(x * 2.0**20), y * 2.0**20, rtol=1e-12), name
        assert 0 < np.abs(y - x).max() < 0.5, name
    got = quantise(x.astype(np.float32), ActFormat.MXINT8).values().reshape(3, -1)[:, :200]
    assert (formats["MXINT8"](x) == got).all()


def test_the_claims_of_the_documentation_hold_on_small_samples(tables: ModuleType) -> None:
    signals = tables.signal_table(1 << 16)
    for name, row in signals.items():
        assert row["bf16"] is None
        assert row["MXINT16"] > row["MXINT8"]
        if "other 31" not in name:
            assert row["MXINT8"] > max(row["MXFP8 ceil"], row["MXFP8 floor"]), name
    assert signals["the same, the other 31 (30x)"]["MXINT8"] < 25
    outliers = tables.outlier_table(1 << 16)
    better = {size: row["MXINT8"] > row["MXFP8 ceil"] for size, row in outliers.items()}
    assert [better[s] for s in ("4", "6", "7", "8", "10", "100")] == [True] * 3 + [False] * 3


def test_a_whole_expert_ranks_the_formats(tables: ModuleType) -> None:
    row = tables.expert_table(256, 128, 8)["Gaussian"]
    assert row["MXINT16"] < row["bf16"] < row["MXINT8"] < row["MXFP8 ceil"] < row["MXFP8 floor"]
    contract = tables.contract_table(256, 128, 8)
    for act in ActFormat:
        errors = contract[act.name]
        assert errors["the whole contract"] < 1.05 * errors["formats alone"]


def test_recorded_activations_and_a_models_own_experts(tables: ModuleType, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((40, 64)).astype(np.float32)
    bf16 = (x.view(np.uint32) >> 16).astype(np.uint16)
    np.savez(tmp_path / "a.npz", **{"layer1.x": bf16, "layer1.h": x[:, :48].astype(np.float16)})
    activations = tables.read_activations([tmp_path / "a.npz"])
    assert {k: v.shape for k, v in activations.items()} == {
        "layer1.x": (40, 64),
        "layer1.h": (40, 48),
    }
    recorded = tables.recorded_table(activations)
    assert list(recorded) == ["layer1.h", "layer1.x"]
    assert recorded["layer1.x"]["bf16"] is None
    for family in ("qwen3_moe", "gpt_oss"):
        folder = tmp_path / family
        write_toy_checkpoint(folder, family)
        model = tables.model_table(folder, activations, experts=2, tokens=16)
        assert list(model) == ["layer1.x"]
        assert 0 < model["layer1.x"]["MXINT16"] < model["layer1.x"]["MXINT8"] < 0.1


def test_outlier_share_counts_blocks(tables: ModuleType) -> None:
    x = np.ones((2, 64))
    x[0, 3], x[1, 40] = 8.0, 7.0
    assert tables.outlier_share(x) == 0.25
    x[0, :32] = 0
    assert tables.outlier_share(x) == 0


def test_the_page_is_what_its_record_says(tables: ModuleType) -> None:
    record = json.loads(tables.RECORD.read_text())
    assert tables.PAGE.read_text() == tables.render(record)
    assert set(record["tables"]) == set(sys.modules["error_page"].CHAPTERS)
    assert record["machine"]["cpu"]


def test_rendering_alone_measures_nothing(tables: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    tables.main(["--render", "--page", str(page)])
    assert page.read_text() == tables.PAGE.read_text()
