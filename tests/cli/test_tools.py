"""``synth``, ``bench cpu``, ``verify bits``: that the commands pass on what they are told."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from moet.bench import cpu
from moet.bench.record import Record, make_record
from moet.bench.rig import Shape
from moet.checkpoint import open_checkpoint
from moet.checkpoint.synth import PRESETS
from moet.cli import main as cli
from moet.formats.mxint import ActFormat
from moet.verify import bits

from .conftest import Moet

SMALL = ("--layers", "1", "--experts", "8", "--vocab", "256")


def test_synth_writes_a_checkpoint_and_prints_its_folder(moet: Moet, tmp_path: Path) -> None:
    done = moet("synth", "qwen3-30b-a3b", *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "qwen3-30b-a3b-synth-1l-8e\n"
    assert "published as BF16; these are MXFP4" in done.stderr
    checkpoint = open_checkpoint(tmp_path / done.stdout.strip())
    geometry = checkpoint.geometry
    assert (geometry.layers, geometry.experts, geometry.hidden) == (1, 8, 2048)
    assert done.stderr.startswith("writing ")
    assert "no tokenizer, so not for serving: it needs 1024 words" in done.stderr


def test_synth_json(moet: Moet, tmp_path: Path) -> None:
    done = moet("synth", "qwen3-30b-a3b", "out", *SMALL, "--json", "--seed", "3")
    facts = json.loads(done.stdout)
    files = sum(f.stat().st_size for f in (tmp_path / "out").glob("*.safetensors"))
    assert facts["folder"] == "out"
    assert (facts["complete"], facts["published"], facts["experts"]) == (True, "BF16", "MXFP4")
    assert 0 < facts["bytes"] <= files


def test_synth_lists_its_presets(moet: Moet) -> None:
    head, *rows = moet("synth", "--list").stdout.splitlines()
    assert head.split()[:2] == ["PRESET", "SIZE"]
    assert [row.split()[0] for row in rows] == sorted(PRESETS)
    columns = ["qwen3-30b-a3b", "17.21 GiB", "48 x 128, top-8", "yes"]
    assert [text.strip() for text in re.split("  +", rows[-1])] == columns
    told = json.loads(moet("synth", "--list", "--json").stdout)
    assert [preset["name"] for preset in told] == sorted(PRESETS)
    (qwen,) = (preset for preset in told if preset["name"] == "qwen3-30b-a3b")
    assert (qwen["published"], qwen["complete"]) == ("BF16", True)
    assert (qwen["bytes"], qwen["moe_layers"], qwen["serves"]) == (18_483_671_040, 48, "yes")


def test_synth_refuses_a_full_folder_and_a_model_that_is_not_known(
    moet: Moet, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("the only copy")
    for arguments in (("qwen3-30b-a3b", "full", *SMALL), ("nosuch", "new", *SMALL)):
        done = moet("synth", *arguments)
        assert done.returncode == 2
        assert "hint: " in done.stderr
    assert [path.name for path in tmp_path.glob("full/*")] == ["thesis.txt"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> list[cpu.Options]:
    """A bench that measures nothing and remembers what it was asked for."""
    asked: list[cpu.Options] = []
    row = {"kind": "speed", "who": "moet mxint16", "threads": 1, "tokens": 1, "experts": 2.0}
    row |= {"us": 10.0, "gb_s": 9.0, "read_gb_s": 10.0, "ratio": 0.9, "samples": 5, "quiet": 5}

    def run(options: cpu.Options, progress: Any) -> Record:
        asked.append(options)
        progress("1 threads, 1 tokens", 0.5)
        return make_record("cpu", asdict(options) | {"isa": "avx2"}, [row])

    monkeypatch.setattr(cpu, "run", run)
    return asked


def test_bench_cpu_passes_everything_on(
    bench: list[cpu.Options], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--hidden", "256", "--intermediate", "128", "--experts", "8", "--top-k", "2"]
    rest = ["--tokens", "1,4", "--threads", "2", "--act", "int8", "--samples", "3", "--busy", "1"]
    assert cli.run(["bench", "cpu", *sizes, *rest, "--peers", "none", "--json"]) == 0
    (options,) = bench
    assert options == cpu.Options(
        shape=Shape(hidden=256, intermediate=128, experts=8, top_k=2),
        acts=(ActFormat.MXINT8,),
        tokens=(1, 4),
        threads=(2,),
        samples=3,
        busy=1,
        peers=(),
    )
    record = json.loads(capsys.readouterr().out)
    assert record["results"][0]["who"] == "moet mxint16"


def test_bench_cpu_for_people(bench: list[cpu.Options], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "cpu"]) == 0
    assert bench == [cpu.Options()]
    shown = capsys.readouterr().out
    assert "moet mxint16" in shown
    assert "\x1b[" not in shown


@pytest.mark.parametrize("differing", [0, 3])
@pytest.mark.parametrize("as_json", [True, False])
def test_verify_bits(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    as_json: bool,
    differing: int,
) -> None:
    asked: list[tuple[int, int, str]] = []

    def run(outputs: int, seed: int, _progress: Any, isa: str) -> bits.BitsReport:
        asked.append((outputs, seed, isa))
        return bits.BitsReport(
            seed=seed,
            cases=1,
            outputs=1000,
            compared={"avx2": 1000},
            differing={"avx2": differing},
            first="token 3" if differing else "",
        )

    monkeypatch.setattr(bits, "run", run)
    monkeypatch.setenv("MOET_ISA", "avx2")
    flags = ["--json"] if as_json else []
    status = cli.run(["verify", "bits", "--outputs", "1000", "--seed", "7", *flags])
    assert status == (1 if differing else 0)
    assert asked == [(1000, 7, "avx2")]
    shown = capsys.readouterr().out
    if as_json:
        assert json.loads(shown)["passed"] is (differing == 0)
    else:
        assert f"{differing} of 1,000 outputs differ from the reference" in shown
        assert ("token 3" in shown) == bool(differing)
