"""The memory bench: what the sampler counts, and the limit; `moet serve` is a stand-in here."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from moet.base.errors import EngineError, MachineError, UsageError
from moet.bench import memory
from moet.bench.footprint import Footprint, Sampler, family, footprint, footprint_of
from moet.bench.memory import BARE, EXPERTS, Options
from moet.bench.memory_table import render
from moet.bench.record import Record
from moet.bench.serving import Serving
from moet.checkpoint.geometry import read_geometry
from moet.testing.toy import toy_config, write_toy_checkpoint

MIB = 1 << 20
STAND_IN = (sys.executable, str(Path(__file__).with_name("stand_in_server.py")))

# A parent and its child: 64 MiB shared, 16 MiB of its own in each, 32 MiB that the parent had.
RELATIVES = """
import mmap, os, signal, sys, time
def filled(size):
    area = mmap.mmap(-1, size << 20, flags=mmap.MAP_SHARED if size == 64 else mmap.MAP_PRIVATE)
    area.write(b"x" * (size << 20))
    return area
shared = filled(64)
gone = filled(32)
gone.close()
ready = os.pipe()
child = os.fork()
own = filled(16)
shared.seek(0)
shared.read()
if child == 0:
    os.write(ready[1], b"x")
    time.sleep(60)
os.read(ready[0], 1)
print(child, flush=True)
sys.stdin.read()
os.kill(child, signal.SIGKILL)
"""


@pytest.fixture
def relatives() -> Iterator[tuple[int, int]]:
    command = [sys.executable, "-c", RELATIVES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        yield parent.pid, int(parent.stdout.readline())


def test_shared_memory_counts_once_and_private_memory_in_each(relatives: tuple[int, int]) -> None:
    parent, child = relatives
    assert family(parent) == [parent, child]
    one, both = footprint_of(parent), footprint(relatives)
    assert both.shared == 64 * MIB
    assert one.shared == 32 * MIB
    assert 32 * MIB <= both.private < 48 * MIB
    assert one.file < both.file
    assert one.highest >= (64 + 32) * MIB
    assert both.total == both.private + both.shared + both.file


def lay(root: Path, pid: int, parent: int, **kib: int) -> None:
    """A process in a /proc of our own."""
    folder = root / f"proc/{pid}"
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} (a b) S {parent} " + "0 " * 20)
    given = {"VmHWM": 0, "RssFile": 0, "Pss_Anon": 0, "SwapPss": 0, "Pss_Shmem": 0}
    given |= {"Private_Hugetlb": 0, "Shared_Hugetlb": 0, **kib}
    for name in ("status", "smaps_rollup"):
        lines = [f"{key}:\t{value} kB\n" for key, value in given.items()]
        (folder / name).write_text("Name:\tx y\n" + "".join(lines))


def test_every_kind_of_memory_of_the_family_and_of_nobody_else(tmp_path: Path) -> None:
    lay(tmp_path, 10, 1, Pss_Anon=1, SwapPss=2, Private_Hugetlb=4, VmHWM=100)
    lay(tmp_path, 20, 10, Pss_Shmem=8, Shared_Hugetlb=16, RssFile=32, VmHWM=200)
    lay(tmp_path, 30, 20, RssFile=64)
    lay(tmp_path, 40, 1, Pss_Anon=1000)
    (tmp_path / "proc/30/smaps_rollup").write_text("")  # it ends just now
    (tmp_path / "proc/uptime").write_text("1 1")
    assert family(10, tmp_path) == [10, 20, 30]
    whole = footprint([*family(10, tmp_path), 4711], tmp_path)
    assert whole == Footprint(private=7 << 10, shared=24 << 10, file=32 << 10, highest=300 << 10)


def test_a_kernel_that_does_not_say_it_is_refused(tmp_path: Path) -> None:
    lay(tmp_path, 10, 1)
    (tmp_path / "proc/10/smaps_rollup").write_text("Pss: 5 kB\n")
    with pytest.raises(MachineError, match="lacks Pss_Anon"):
        footprint_of(10, tmp_path)


def test_a_peak_between_two_takes_is_kept_and_then_forgotten() -> None:
    hold = "import sys; x = b'x' * (80 << 20); print('up', flush=True); sys.stdin.readline();"
    drop = "del x; print('down', flush=True); sys.stdin.readline()"
    command = [sys.executable, "-c", hold + drop]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        with Sampler(process.pid, 0.01) as sampler:
            begun = sampler.looks
            while sampler.looks < begun + 2:
                time.sleep(0.01)
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.readline()
            first = sampler.take()
            sampler.look()
            second = sampler.take()
    assert first.private > 80 * MIB > second.private > 0
    assert sampler.last.highest > 80 * MIB
    of_nobody = Sampler(process.pid)
    of_nobody.look()
    with pytest.raises(MachineError, match="no memory of the process was seen"):
        of_nobody.take()


def test_an_error_in_the_thread_is_the_takers(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise MachineError("lacks Pss_Anon")

    with Sampler(os.getpid(), 0.01) as sampler:
        monkeypatch.setattr(sampler, "look", broken)
        sampler._thread.join(5)
        with pytest.raises(MachineError, match="lacks Pss_Anon"):
            sampler.take()


def test_the_bare_model_differs_in_its_experts_alone() -> None:
    for family_name in ("qwen3_moe", "gpt_oss", "deepseek_v4"):
        whole = toy_config(family_name)
        less = memory.bare(whole)
        changed = {key for key in whole if whole[key] != less.get(key)}
        assert len(changed) == 3
        geometry = read_geometry(less, Path("config.json"))
        assert (geometry.experts, geometry.top_k, geometry.intermediate) == (1, 1, 32)
        assert geometry.hidden == whole["hidden_size"]
    nested = {"model_type": "deepseek_v41", "text_config": toy_config("deepseek_v4")}
    assert memory.bare(nested)["text_config"]["n_routed_experts"] == 1


@pytest.fixture
def options(tmp_path: Path) -> Options:
    config = toy_config(hidden=256, intermediate=256, experts=64, vocab=memory.VOCAB)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return Options(
        config=str(tmp_path / "config.json"), layers=2, folder=tmp_path, prompt=40, answer=3
    )


@pytest.mark.parametrize(("factor", "holds"), [(1.0, True), (1.5, False)])
def test_the_limit(
    options: Options, factor: float, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SPARE", 2 * MIB)
    told: list[str] = []
    command = (*STAND_IN, str(factor))
    record = memory.run(options, lambda what, _share: told.append(what), command)
    bare, whole = record.rows("run")
    assert (bare["who"], whole["who"]) == (BARE, EXPERTS)
    assert whole["expert_bytes"] == 2 * 64 * 3 * 256 * 256 * 17 // 32
    assert bare["expert_bytes"] == 2 * 3 * 256 * 32 * 17 // 32
    (limit,) = record.rows("limit")
    assert limit["holds"] is holds
    assert limit["own_peaks_hold"] is holds
    spent = (factor - 1) * whole["expert_bytes"]
    assert abs(limit["beyond_experts_bytes"] - spent) < 2 * MIB
    assert list(dict.fromkeys(told)) == ["writing the checkpoint", "loading", "answering"]
    assert [p.name for p in options.folder.iterdir()] == ["config.json"]
    assert Record.from_json(record.to_json()).results == record.results
    text = io.StringIO()
    Console(file=text, width=200).print(render(record))
    assert ("MORE than the limit" in text.getvalue()) is not holds


def test_a_server_that_does_not_start_says_why(options: Options) -> None:
    with pytest.raises(EngineError, match="did not start: error: no room / hint: buy memory"):
        memory.run(options, command=(*STAND_IN, "-1"))
    assert [p.name for p in options.folder.iterdir()] == ["config.json"]


def test_a_refused_request_is_an_error(tmp_path: Path) -> None:
    write_toy_checkpoint(tmp_path / "model")
    command = (*STAND_IN, "1")
    with Serving(tmp_path / "model", ["--max-model-len", "8"], command) as server:
        server.wait()
        assert server.complete([1, 2], 6) == "xxxxxx"
        with pytest.raises(EngineError, match="answers 400"):
            server.complete([1, 2], 7)
        server.stop()
        with pytest.raises(EngineError, match="gives no answer"):
            server.complete([1, 2], 6)


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="1 or more"):
        Options(together=0)
