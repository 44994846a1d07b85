"""The heat file: what is written is read, and everything else is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moet.base.errors import UsageError
from moet.checkpoint.families import ExpertFormat
from moet.checkpoint.geometry import ModelGeometry
from moet.formats.mxint import ActFormat
from moet.hybrid.heat import FORMAT, model_identity, read_heat, write_heat

GEOMETRY = ModelGeometry(
    architecture="qwen3_moe", layout="qwen3_moe", hidden=64, intermediate=32, layers=3,
    moe_layers=(0, 2), draft_layers=0, experts=3, top_k=2, expert_format=next(iter(ExpertFormat)),
    act=ActFormat.MXINT8, activation="silu", limit=None, biased=False, routed_scale=1.0,
)  # fmt: skip
HEAT = {0: (5, 0, 7), 2: (1, 2, 3)}

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "heat.json"


def test_what_is_written_is_read(path: Path) -> None:
    write_heat(path, GEOMETRY, HEAT)
    assert read_heat(path, GEOMETRY) == HEAT
    write_heat(path, GEOMETRY, {0: (0, 0, 0), 2: (9, 9, 9)})
    assert read_heat(path, GEOMETRY)[2] == (9, 9, 9)
    assert list(path.parent.iterdir()) == [path]


def test_the_same_shapes_may_share_heat(path: Path) -> None:
    write_heat(path, GEOMETRY, HEAT)
    assert read_heat(path, replace(GEOMETRY, act=ActFormat.MXINT16, limit=7.0)) == HEAT


@pytest.mark.parametrize(
    ("field", "value"),
    [("experts", 4), ("architecture", "gpt_oss"), ("moe_layers", (0, 1)), ("hidden", 96)],
)
def test_another_model_s_heat_is_refused(path: Path, field: str, value: Any) -> None:
    write_heat(path, GEOMETRY, HEAT)
    other = replace(GEOMETRY, **{field: value})
    with pytest.raises(UsageError, match=f"another model: {field}") as caught:
        read_heat(path, other)
    assert caught.value.hint


CHANGES: dict[str, tuple[Change, str]] = {
    "format": (lambda r: r.update(format="moet-heat-0"), FORMAT),
    "extra field": (lambda r: r.update(more=1), "more"),
    "no counts": (lambda r: r.pop("counts"), "fields"),
    "model": (lambda r: r.update(model=[]), "model is not an object"),
    "counts": (lambda r: r.update(counts=[]), "counts is not an object"),
    "a layer too few": (lambda r: r["counts"].pop("2"), r"layers \[2\]"),
    "a layer too many": (lambda r: r["counts"].update({"1": [0, 0, 0]}), r"layers \[1\]"),
    "layer name": (lambda r: r["counts"].update({"02": [0, 0, 0]}), "layer '02'"),
    "no list": (lambda r: r["counts"].update({"2": 5}), "layer 2 are not a list"),
    "short": (lambda r: r["counts"].update({"2": [1, 2]}), "layer 2 has 2 counts, not 3"),
    "negative": (lambda r: r["counts"].update({"2": [1, 2, -3]}), "count of -3"),
    "fraction": (lambda r: r["counts"].update({"2": [1, 2, 0.5]}), "count of 0.5"),
    "truth": (lambda r: r["counts"].update({"2": [1, 2, True]}), "count of True"),
    "huge": (lambda r: r["counts"].update({"2": [1, 2, 1 << 63]}), "count of 9223"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_broken_file_is_named(path: Path, name: str) -> None:
    change, said = CHANGES[name]
    write_heat(path, GEOMETRY, HEAT)
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(UsageError, match=said) as caught:
        read_heat(path, GEOMETRY)
    assert caught.value.hint
    assert path.name in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"\xff", b'{"format": 1, "format": 2}', b"NaN"])
def test_bytes_that_are_no_heat_file_are_named(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    with pytest.raises(UsageError, match="heat file"):
        read_heat(path, GEOMETRY)


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(UsageError, match=r"no heat file .*heat\.json"):
        read_heat(path, GEOMETRY)
    with pytest.raises(UsageError, match="no heat file"):
        read_heat(path.parent, GEOMETRY)


def test_a_folder_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        write_heat(path.parent / "none" / "heat.json", GEOMETRY, HEAT)


def test_wrong_counts_are_not_written(path: Path) -> None:
    with pytest.raises(UsageError, match="layer 2 has 1 counts"):
        write_heat(path, GEOMETRY, {0: (1, 2, 3), 2: (1,)})
    assert not path.exists()


def test_a_write_that_fails_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_heat(path, GEOMETRY, HEAT)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UsageError, match="No space left"):
        write_heat(path, GEOMETRY, {0: (0, 0, 0), 2: (0, 0, 0)})
    monkeypatch.undo()
    assert read_heat(path, GEOMETRY) == HEAT
    assert list(path.parent.iterdir()) == [path]


def test_identity_is_json(path: Path) -> None:
    identity = model_identity(GEOMETRY)
    assert json.loads(json.dumps(identity)) == identity
