from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from moet.base.errors import MachineError
from moet.machine import Machine, read_machine, usable_cpus
from moet.machine.cpu import one_per_core, parse_cpu_list, read_cpu
from moet.machine.memory import read_memory

from .conftest import Tree
from .test_cgroup import v2


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", (0,)), ("0-2,7\n", (0, 1, 2, 7)), ("5,1-1", (1, 5)), ("", ())]
)
def test_cpu_lists(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus


def test_a_plain_machine(tree: Tree) -> None:
    cpu = read_cpu(tree({}))
    assert (cpu.model, cpu.online, cpu.numa_nodes) == ("Ryzen of the House", 8, 2)
    assert cpu.usable == tuple(range(8))
    assert cpu.cores == (0, 1, 2, 3)
    assert cpu.threads == 4


@pytest.mark.parametrize(
    ("allowed", "quota", "threads"),
    [
        ("0-7", "max 100000", 4),
        ("0-7", "250000 100000", 2),
        ("0-7", "50000 100000", 1),
        ("0,4", "max 100000", 1),
        ("2,3,7", "900000 100000", 2),
    ],
)
def test_threads_fit_affinity_cores_and_quota(
    tree: Tree, allowed: str, quota: str, threads: int
) -> None:
    status = {"proc/self/status": f"Cpus_allowed_list:\t{allowed}\n"}
    root = tree(v2(**{"sys/fs/cgroup/a/b/cpu.max": quota}) | status)
    assert read_cpu(root).threads == threads


def test_cores_of_a_machine_without_topology(tmp_path: Path) -> None:
    assert one_per_core((3, 1, 2), tmp_path) == (3, 1, 2)


def test_a_pinned_worker_can_ask_for_the_cpus_of_its_parent(tree: Tree) -> None:
    root = tree(
        {
            "proc/self/status": "Cpus_allowed_list:\t0\n",
            "proc/77/status": "Cpus_allowed_list:\t0-1\n",
        }
    )
    assert (usable_cpus(root), usable_cpus(root, pid=77)) == ((0,), (0, 1))


def test_memory_without_and_with_a_limit(tree: Tree) -> None:
    memory = read_memory(tree({}))
    assert (memory.total, memory.available, memory.limit) == (1_024_000, 819_200, None)
    assert (memory.transparent_huge, memory.huge_free) == ("madvise", 6 << 20)
    assert memory.memlock == 8 << 20
    group = {"memory.max": "500000", "memory.current": "400000"}
    limited = read_memory(tree(v2(**{f"sys/fs/cgroup/a/b/{k}": v for k, v in group.items()})))
    assert (limited.total, limited.available, limited.limit) == (500_000, 100_000, 500_000)


def test_a_limit_above_the_machine_is_none(tree: Tree) -> None:
    group = {"memory.max": "99000000", "memory.current": "1"}
    memory = read_memory(tree(v2(**{f"sys/fs/cgroup/a/b/{k}": v for k, v in group.items()})))
    assert (memory.total, memory.limit) == (1_024_000, None)


def test_this_machine() -> None:
    machine = read_machine()
    assert machine.cpu.usable == tuple(sorted(os.sched_getaffinity(0)))
    assert 1 <= machine.cpu.threads <= len(machine.cpu.cores) <= machine.cpu.online
    assert 0 < machine.memory.available <= machine.memory.total
    assert {"python", "linux", "moet", "numpy"} <= set(machine.versions)


def test_json_round_trip(tree: Tree) -> None:
    machine = read_machine(tree({}))
    assert Machine.from_json(machine.to_json()) == machine


@pytest.mark.parametrize("damage", ["{", "[]", "{}", "missing", "extra"])
def test_what_is_no_snapshot_is_refused(tree: Tree, damage: str) -> None:
    raw = json.loads(read_machine(tree({})).to_json())
    if damage == "missing":
        del raw["cpu"]["cores"]
    elif damage == "extra":
        raw["memory"]["swap"] = 1
    text = json.dumps(raw) if damage in ("missing", "extra") else damage
    with pytest.raises(MachineError, match="not a machine snapshot") as error:
        Machine.from_json(text)
    assert error.value.hint


def test_a_machine_without_proc_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="proc"):
        read_machine(tmp_path)
