from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from moet.machine import processes
from moet.machine.processes import Process


def wait_until_gone(*names: Process) -> None:
    deadline = time.monotonic() + 5
    while any(processes.is_alive(name) for name in names):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_this_process_is_alive_under_its_own_name_only() -> None:
    me = processes.identify(os.getpid())
    assert me is not None
    assert processes.is_alive(me)
    assert not processes.is_alive(Process(me.pid, me.started - 1))
    assert processes.boot_id() == processes.boot_id() != ""


def test_a_command_with_blanks_and_brackets(tmp_path: Path) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    fields = "S 3 4 5 " + " ".join("0" for _ in range(15)) + " 4242 0 0"
    (tmp_path / "proc/7/stat").write_text(f"7 (a (b) c) {fields}\n")
    stat = processes.read_stat(7, tmp_path)
    assert stat is not None
    assert (stat.state, stat.parent, stat.started) == ("S", 3, 4242)
    assert processes.read_stat(8, tmp_path) is None


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    name = processes.identify(child.pid)
    while (stat := processes.read_stat(child.pid)) and stat.state != "Z":
        time.sleep(0.01)
    assert name is not None
    assert not processes.is_alive(name)
    child.wait()


def test_a_family_is_known_by_its_environment_and_killed_by_name() -> None:
    mark = f"test-{os.getpid()}"
    code = "import subprocess; subprocess.run(['sleep', '60'], start_new_session=True)"
    child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "MARK": mark})
    deadline = time.monotonic() + 10
    while len(family := processes.with_variable("MARK", mark)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert any("sleep" in processes.command_line(p.pid) for p in family)
    assert all(processes.kill(p) for p in family)
    child.wait()
    wait_until_gone(*family)
    assert not any(processes.kill(p) for p in family)
    assert processes.with_variable("MARK", mark) == []


def test_shared_memory_that_a_process_maps(tmp_path: Path) -> None:
    name = f"moet-test-{os.getpid()}"
    path = Path("/dev/shm") / name
    try:
        path.write_bytes(bytes(4096))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            assert name in processes.mapped_shared_memory(os.getpid())
    finally:
        path.unlink()
    assert name not in processes.mapped_shared_memory(os.getpid())


def test_a_child_dies_with_its_parent() -> None:
    """The parent is killed with SIGKILL, so that it cannot clean up."""
    grandchild = (
        "import time; from moet.machine.processes import die_with_parent; die_with_parent();"
        "print('up', flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys;"
            f"p = subprocess.Popen([sys.executable, '-c', {grandchild!r}]);"
            "print(p.pid, flush=True); p.wait()",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    lines = [parent.stdout.readline().strip() for _ in range(2)]
    name = processes.identify(next(int(line) for line in lines if line.isdigit()))
    assert name is not None
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until_gone(name)
    parent.stdout.close()
