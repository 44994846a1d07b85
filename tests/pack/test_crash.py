"""kill -9 at every call that changes the disk, and at random moments: nothing wrong is accepted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moet.testing.toy import write_toy_checkpoint

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write_toy_checkpoint(tmp_path / "m", experts=3, layers=1, vocab=32)
    return tmp_path / "m"


def crash(*arguments: object) -> int:
    """The number that the program prints."""
    command = [sys.executable, "-m", "tests.pack.crash", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[0])


def test_at_every_call(small: Path, tmp_path: Path) -> None:
    kills = crash(small, tmp_path, "calls")
    assert kills > 50  # 3 records, each with its journal line; folders, locks, manifest; twice


def test_at_random_moments(small: Path, tmp_path: Path) -> None:
    wholes = crash(small, tmp_path, "times", 100)
    assert 0 < wholes < 100  # some runs were killed before the end and some after
