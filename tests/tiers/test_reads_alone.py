"""The reader in processes of their own: forbidden calls, low limits, forks, sudden ends."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moet import _core


@pytest.fixture(params=["uring", "threads"])
def mode(request: pytest.FixtureRequest) -> str:
    if request.param == "uring" and (why := _core.probe_uring()):
        pytest.skip(f"io_uring cannot be used here: {why}")
    return str(request.param)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    np.random.default_rng(0).integers(0, 256, (3 << 20) + 1000, np.uint8).tofile(path)
    return path


def run_python(text: str, *arguments: object) -> str:
    command = [sys.executable, "-c", text, *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


PRELUDE = """
import ctypes, errno, os, resource, sys
sys.path.insert(0, os.getcwd())
from pathlib import Path
import numpy as np
from moet.base.errors import TierError
from moet.tiers.reads import Ask, Reader
from tests.tiers.disk_records import memory

def check(reader, path):
    size = os.path.getsize(path)
    to = memory(size)
    index = reader.open(path).index
    (future,) = reader.submit([Ask(index, 0, to.size, to.ctypes.data)])
    assert future.result(60).nbytes == size
    assert np.array_equal(to[:size], np.fromfile(path, np.uint8))
"""

FORBID = """
class Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte),
                ("k", ctypes.c_uint)]
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filters", ctypes.POINTER(Filter))]

def forbid(call, number):
    # load the number of the call; is it that one? then fail with the errno, else allow
    filters = (Filter * 4)((0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, 0x50000 | number),
                           (0x06, 0, 0, 0x7FFF0000))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    program = Program(4, filters)
    if libc.prctl(22, 2, ctypes.byref(program), 0, 0):  # PR_SET_SECCOMP, a filter
        print("no seccomp:", os.strerror(ctypes.get_errno()))
        sys.exit(0)
"""
IO_URING_SETUP, IO_URING_ENTER = 425, 426  # on all of x86-64, arm64 and riscv64


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize("call", [IO_URING_SETUP, IO_URING_ENTER])
def test_where_io_uring_is_forbidden_threads_read(call: int, number: int, file: Path) -> None:
    text = (
        PRELUDE
        + FORBID
        + """
path = Path(sys.argv[1])
forbid(int(sys.argv[2]), int(sys.argv[3]))
with Reader("auto") as reader:
    assert reader.backend == "threads", reader.backend
    assert "seccomp" in reader.findings()[0].fact, reader.findings()
    check(reader, path)
try:
    Reader("uring")
except TierError as error:
    assert "io_uring" in str(error) and "MOET_IO" in error.hint
    print("refused")
"""
    )
    if _core.probe_uring().startswith("this build"):
        pytest.skip(_core.probe_uring())
    said = run_python(text, file, call, number)
    if "no seccomp" in said:
        pytest.skip(said)
    assert "refused" in said


def test_a_locked_memory_limit_is_told_and_reads_go_on() -> None:
    text = (
        PRELUDE
        + """
import tempfile
resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
with tempfile.TemporaryDirectory(dir="/tmp") as folder, Reader("uring") as reader:
    path = Path(folder) / "file"
    np.arange(100_000, dtype=np.uint32).tofile(path)
    arena = memory(64 << 20)
    finding = reader.register(arena.ctypes.data, arena.size)
    assert "could not be registered" in finding.fact and "64.00 KiB" in finding.fact, finding
    assert "ulimit -l" in finding.fix
    check(reader, path)
"""
    )
    if why := _core.probe_uring():
        pytest.skip(f"io_uring cannot be used here: {why}")
    run_python(text)


def test_the_limit_of_open_files_is_named(file: Path) -> None:
    text = (
        PRELUDE
        + """
with Reader(sys.argv[2]) as reader:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    before = len(os.listdir("/proc/self/fd"))
    try:
        for _ in range(200):
            reader.open(Path(sys.argv[1]))
    except TierError as error:
        assert "ulimit -n" in error.hint, error.hint
        print("named")
"""
    )
    for mode in ("auto", "threads"):
        assert "named" in run_python(text, file, mode)


def test_a_process_may_end_with_reads_in_flight(mode: str, file: Path) -> None:
    text = (
        PRELUDE
        + """
reader = Reader(sys.argv[2], depth=1, piece=4096)
index = reader.open(Path(sys.argv[1])).index
to = memory(64 << 20)
futures = reader.submit([Ask(index, 0, 1 << 20, to.ctypes.data + (i << 20)) for i in range(64)])
print("ending")
"""
    )
    assert "ending" in run_python(text, file, mode)


def test_a_forked_child_is_told(mode: str, file: Path) -> None:
    text = (
        PRELUDE
        + """
reader = Reader(sys.argv[2])
index = reader.open(Path(sys.argv[1])).index
to = memory(4096)
child = os.fork()
if child == 0:
    try:
        reader.submit([Ask(index, 0, 4096, to.ctypes.data)])
    except TierError as error:
        sys.exit(0 if "fork" in str(error) else 1)  # an ordinary end, finalizers and all
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
check(reader, Path(sys.argv[1]))
reader.close()
"""
    )
    run_python(text, file, mode)
