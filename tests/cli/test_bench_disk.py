"""``bench disk``: that it passes on what it is told, and names what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moet.cli import main as cli

SMALL = "--record 64KiB --depths 1,2 --size 1MiB --seconds 0.01 --turns 1 --queue 2 --piece 16KiB"


def test_for_programs_by_the_way_that_a_setting_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOET_IO", "threads")
    assert cli.run(["bench", "disk", str(tmp_path), *SMALL.split(), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["bench"] == "disk"
    assert record["setup"]["record_bytes"] == 64 << 10
    assert record["setup"]["file_bytes"] == 1 << 20
    assert (record["setup"]["queue_depth"], record["setup"]["piece"]) == (2, 16 << 10)
    reads = [(r["who"], r["depth"]) for r in record["results"] if r["kind"] == "read"]
    assert reads == [("threads", 1), ("threads", 2)]
    assert list(tmp_path.iterdir()) == []


def test_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "disk", str(tmp_path), *SMALL.split()]) == 0
    assert "checksums always" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/no/such/place"], "neither a file nor a folder"),
        (["--record", "1000", "."], "1000 bytes"),
        (["--depths", "0", "."], "depth"),
        (["--size", "many", "."], "is not a size"),
    ],
)
def test_what_cannot_be_measured_is_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", "disk", *arguments]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "hint: " in told
