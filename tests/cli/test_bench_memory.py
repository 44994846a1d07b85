"""``bench memory``: that it passes on what it is told, and says whether the limit is kept."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from moet.bench import memory
from moet.bench.record import Record, Row, make_record
from moet.cli import main as cli

GIB = 1 << 30


def run_row(who: str, size: int) -> Row:
    sizes = {"expert": size, "loading_total": 3 * GIB, "answering_total": GIB, "peak": 4 * GIB}
    figures = {f"{name}_bytes": value for name, value in sizes.items()}
    return {"kind": "run", "who": who, **figures, "ready_s": 61.0}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, holds: bool) -> list[memory.Options]:
    """A bench that measures nothing and remembers what it was asked for."""
    asked: list[memory.Options] = []

    def run(options: memory.Options, progress: Any) -> Record:
        asked.append(options)
        progress("loading", 0.0)
        limit = {"kind": "limit", "limit_bytes": 5 * GIB, "peak_bytes": 4 * GIB, "holds": holds}
        limit |= {"beyond_experts_bytes": 7 << 20}
        rows = [run_row(memory.BARE, 0), run_row(memory.EXPERTS, 2 * GIB), limit]
        return make_record("serve-memory", asdict(options) | {"folder": None}, rows)

    monkeypatch.setattr(memory, "run", run)
    return asked


@pytest.mark.parametrize("holds", [True, False])
def test_for_programs(
    asked: list[memory.Options], holds: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--config", "c", "--layers", "0", "--experts", "8", "--kv-cache", "2MiB"]
    rest = ["--prompt", "9", "--answer", "3", "--together", "2", "--folder", str(tmp_path)]
    assert cli.run(["bench", "memory", *sizes, *rest, "--json"]) == (0 if holds else 1)
    assert asked == [
        memory.Options(
            config="c",
            layers=None,
            experts=8,
            folder=tmp_path,
            kv_bytes=2 << 20,
            prompt=9,
            answer=3,
            together=2,
        )
    ]
    assert json.loads(capsys.readouterr().out)["bench"] == "serve-memory"


@pytest.mark.parametrize("holds", [True, False])
def test_for_people(
    asked: list[memory.Options], holds: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", "memory"]) == (0 if holds else 1)
    assert asked == [memory.Options()]
    shown = capsys.readouterr().out
    for text in (memory.BARE, memory.EXPERTS, "2.00 GiB", "1 min 01 s", "7.00 MiB"):
        assert text in shown
    assert ("MORE than the limit" in shown) is not holds


@pytest.mark.parametrize("holds", [True])
def test_a_folder_that_is_not_there(
    asked: list[memory.Options], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", "memory", "--folder", "/no/such"]) == 2
    assert asked == []
    assert "--folder /no/such is not a folder" in capsys.readouterr().err
