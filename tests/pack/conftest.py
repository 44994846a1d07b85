from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moet.checkpoint import Checkpoint, open_checkpoint
from moet.pack.writer import write_pack
from moet.testing.toy import FAMILIES, write_toy_checkpoint

SIZES = {"hidden": 160, "intermediate": 96, "experts": 6, "layers": 2}


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family; do not change them."""
    root = tmp_path_factory.mktemp("toys")
    for family in FAMILIES:
        write_toy_checkpoint(root / family, family, shards=2, **SIZES)
    return {family: root / family for family in FAMILIES}


@pytest.fixture(scope="session")
def toy(toys: dict[str, Path]) -> Checkpoint:
    """One of them, opened."""
    return open_checkpoint(toys["qwen3_moe"])


@pytest.fixture
def mine(toys: dict[str, Path], tmp_path: Path) -> Path:
    """A checkpoint of one file that a test may spoil."""
    write_toy_checkpoint(tmp_path / "mine", **SIZES)
    return tmp_path / "mine"


@pytest.fixture
def packed(toy: Checkpoint, tmp_path: Path) -> Path:
    """A good pack of ``toy`` with two data files; a test may spoil it."""
    return write_pack(toy, [tmp_path / "a", tmp_path / "b"]).folder


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    """Copies a folder, times included."""

    def copy(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / "copies" / folder.name))

    return copy
