"""``bench step``, ``bench moe``, ``verify bits --gpu``: whole commands on a stand-in for a card."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.kernels.cuda_host.emulator import HostGpu, HostLink, build_library, instant_card

from moet.base.errors import KernelError, MachineError
from moet.bench import moe_gpu, step, step_rig
from moet.cli import main as cli
from moet.formats.mxint import ActFormat
from moet.hybrid import probe
from moet.kernels.cuda import opened
from moet.kernels.cuda.opened import OpenedCard
from moet.kernels.spec import LayerSpec
from moet.verify import faults, gpu, hybrid

SPEC = LayerSpec(hidden=64, intermediate=32, experts=8, top_k=2, act=ActFormat.MXINT8)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_library(tmp_path_factory.mktemp("gpu_tools"))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about size."""
    monkeypatch.setenv("MOET_THREADS", "1")
    for room, name, value in (
        (moe_gpu, "READ_BYTES", 1 << 20),
        (moe_gpu, "STEPS", 1),
        (moe_gpu, "REPEATS", 1),
        (moe_gpu, "V4_FLASH", SPEC),
        (step, "WARM_UP", 0),
        (step, "READ_BYTES", 1 << 20),
        (step_rig, "ROUND_TRIPS", 1),
        (hybrid, "TOKENS", (1, 2, 1)),
        (hybrid, "LEAST_RANDOM_SPLITS", 2),
    ):
        monkeypatch.setattr(room, name, value)


class Cards:
    """The cards of this machine: one, number 0."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.gpu = HostGpu(library)
        self.link = HostLink(self.gpu)

    @contextmanager
    def opened(self, cache_dir: Path, ordinal: int) -> Iterator[OpenedCard]:
        if ordinal:
            raise KernelError("cuDeviceGet failed", hint="there is one")
        memory = instant_card()
        yield OpenedCard(gpu=self.gpu, link=self.link, memory=memory)  # type: ignore[arg-type]
        assert self.gpu.held == {}
        memory.close()


@pytest.fixture
def cards(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Cards:
    cards = Cards(library)
    monkeypatch.setattr(opened, "opened_card", cards.opened)
    return cards


STEP = [
    "bench", "step", "--layer", "v4-flash", "--experts", "12", "--layers", "1", "--tokens", "1",
    "--replays", "1",
]  # fmt: skip


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize("as_json", [True, False])
def test_bench_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    status = cli.run([*STEP, "--percent", "50", *(["--json"] if as_json else [])])
    out = capsys.readouterr().out
    assert status in {0, 1}, "whether the limit holds here is not judged"
    if as_json:
        record = json.loads(out)
        (row,) = (row for row in record["results"] if row["kind"] == "step")
        assert (record["bench"], record["setup"]["experts"]) == ("hybrid-step", 12)
        assert (row["variant"], row["percent"], row["tokens"]) == ("poll", 50, 1)
        assert status == int(not row["holds"])
    else:
        assert "poll: us a layer" in out
        assert "extrapolated" in out


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize(
    ("more", "hint"),
    [
        (["--hidden", "65"], "multiple of 32"),
        (["--layer", "gpt-oss"], "v4.1-flash"),
        (["--experts", "3"], "twice as many"),
        (["--percent", "101"], "--percent 0,50,100"),
        (["--variants", "telepathy"], "poll"),
        (["--device", "1"], "there is one"),
    ],
)
def test_bench_step_refuses(capsys: pytest.CaptureFixture[str], more: list[str], hint: str) -> None:
    assert cli.run([*STEP, *more]) == 2
    assert hint in capsys.readouterr().err


def test_a_way_to_wait_that_does_not_work_is_told_or_an_error(
    cards: Cards, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(stream: int, address: int, value: int) -> None:
        raise KernelError("cuStreamWaitValue32 failed: NOT_SUPPORTED")

    monkeypatch.setattr(cards.link, "wait_for_word", refused)
    assert cli.run([*STEP, "--variants", "memop"]) == 2
    assert "NOT_SUPPORTED" in capsys.readouterr().err
    monkeypatch.setenv("MOET_MAILBOX", "memop")
    assert cli.run([*STEP]) == 2
    assert "memop: cuStreamWaitValue32" in capsys.readouterr().err
    with pytest.raises(MachineError):
        probe.choose(cards.gpu, cards.link, _pool(), "memop")


def _pool() -> object:
    from moet.kernels.cpu import Pool

    return Pool(1)


@pytest.mark.usefixtures("cards")
def test_bench_moe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "vllm.json"
    sizes = {"hidden": 64, "intermediate": 32, "experts": 8, "top_k": 2}
    file.write_text(json.dumps(sizes | {"results": [{"who": "vLLM", "tokens": 2, "us": 9}]}))
    command = ["bench", "moe", "--layer", "v4-flash", "--tokens", "1,2", "--against", str(file)]
    assert cli.run([*command, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["bench"] == "moe-gpu"
    assert [row["tokens"] for row in record["results"] if row["kind"] == "gpu"] == [1, 2]
    assert [row["us"] for row in record["results"] if row["kind"] == "other"] == [9]


@pytest.mark.parametrize("broken", [False, True])
def test_verify_bits_gpu(
    cards: Cards, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: bool
) -> None:
    cases = (hybrid.HybridCase(name="two layers", spec=SPEC, layers=2),)
    plain = (gpu.ExamCase(name="one layer", spec=SPEC),)
    kernels, splits = gpu.examine, hybrid.examine
    monkeypatch.setattr(gpu, "examine", lambda *a, **k: kernels(*a, **k, cases=plain))
    monkeypatch.setattr(hybrid, "examine", lambda *a, **k: splits(*a, **k, cases=cases))
    monkeypatch.setattr(faults, "KINDS", ("request",))
    if broken:
        chosen = (probe.Variant.POLL,)
        monkeypatch.setattr("moet.cli.card.variants", lambda *_: chosen)
        cards.gpu.broken = True
    command = ["verify", "bits", "--gpu", "--outputs", "1"]
    assert cli.run([*command, "--json"]) == int(broken)
    record = json.loads(capsys.readouterr().out)
    assert record["bench"] == "hybrid-bits"
    assert record["setup"]["passed"] is not broken
    assert record["setup"]["outputs"] == sum(r["outputs"] for r in record["results"])
    assert {row["kind"] for row in record["results"]} == {"kernels", "hybrid"}
    if not broken:
        assert cli.run([*command, "--faults"]) == 0
        shown = capsys.readouterr().out
        assert "two layers, poll" in shown
        assert "request, hostfunc" in shown


def test_flags_of_a_gpu_without_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify", "bits", "--faults"]) == 2
    assert "--gpu" in capsys.readouterr().err
