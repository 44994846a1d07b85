"""``moet replay``: a made trace, a recorded one, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moet.cli import main as cli
from moet.testing.toy import write_toy_checkpoint

SMALL = [
    "--layers",
    "2",
    "--experts",
    "16",
    "--top-k",
    "2",
    "--steps",
    "60",
    "--prompt-every",
    "20",
]


def test_a_made_trace_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["replay", *SMALL, "--policies", "lru,lfu,optimum", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["bench"] == "replay"
    assert record["setup"]["source"]["made"]["experts"] == 16
    assert len(record["results"]) == 9
    hits = {(r["budget"], r["policy"]): r["hit_rate"] for r in record["results"]}
    assert hits[0.1, "lru"] < hits[0.25, "lru"] < hits[0.5, "lru"] <= hits[0.5, "optimum"]


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["replay", *SMALL, "--budgets", "12.5", "--bandwidth", "2GB"]) == 0
    shown = capsys.readouterr().out
    assert "12.5 %" in shown
    assert "2.0 GB/s" in shown
    assert all(name in shown for name in ("lru", "slru", "lfu", "heat", "optimum"))


def test_a_recorded_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = {"format": "moet-trace-1", "model": {"moe_layers": [7], "experts": 3, "top_k": 1}}
    lines = [header, *([7, 1, [n % 3], []] for n in range(12))]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status = cli.run(["replay", str(path), "--budgets", "100", "--policies", "lru", "--json"])
    assert status == 0
    record = json.loads(capsys.readouterr().out)
    assert record["setup"]["source"] == {"trace": str(path)}
    assert record["results"][0]["hit_rate"] == 1.0


def test_a_pack_is_read_for_real(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOET_CACHE_DIR", str(tmp_path / "cache"))
    model = str(tmp_path / "model")
    write_toy_checkpoint(tmp_path / "model", experts=16, layers=2)
    assert cli.run(["replay", *SMALL, "--model", model]) == 2
    assert "there is no pack" in capsys.readouterr().err
    assert cli.run(["pack", model]) == 0
    capsys.readouterr()
    more = ["--policies", "lru,heat,optimum", "--budgets", "50,5", "--window", "2", "--json"]
    assert cli.run(["replay", *SMALL, "--model", model, *more]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["bench"] == "replay-disk"
    rows = record["results"]
    assert [(row["budget"], row["policy"]) for row in rows] == [
        (budget, name) for budget in (0.5, 0.05) for name in ("lru", "heat")
    ]
    assert cli.run(["replay", *SMALL, *more]) == 0
    predicted = json.loads(capsys.readouterr().out)["results"]
    for row, other in zip(rows, (p for p in predicted if p["policy"] != "optimum"), strict=True):
        assert row["slots"] == other["slots"]
        assert row["read_bytes"] > 0
        assert row["failures"] == 0
        assert row["read_rate"] == pytest.approx(row["read_bytes"] / row["seconds"])
    assert rows[0]["read_bytes"] < rows[2]["read_bytes"], "less memory, more reads"
    assert cli.run(["replay", *SMALL, "--model", model, "--layers", "3"]) == 2
    assert "does not fit a model of 2" in capsys.readouterr().err
    assert cli.run(["replay", *SMALL, "--model", model, "--budgets", "25"]) == 0
    assert "read for real" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["nowhere.jsonl"], ["--budgets", "ten"], ["--policies", "best"], ["--top-k", "999"]],
)
def test_what_cannot_be(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["replay", *arguments]) == 2
    assert "hint:" in capsys.readouterr().err
