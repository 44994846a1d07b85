"""Good checkpoints to look at and to spoil."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moet.testing.toy import FAMILIES, write_toy_checkpoint


@pytest.fixture(scope="session")
def _originals(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    root = tmp_path_factory.mktemp("toys")
    toys = {}
    for family in FAMILIES:
        for shards in (1, 3):
            toys[family, shards] = root / f"{family}-{shards}"
            write_toy_checkpoint(toys[family, shards], family, shards=shards)
    return toys


@pytest.fixture
def toy(tmp_path: Path, _originals: dict[tuple[str, int], Path]) -> Callable[..., Path]:
    """``toy(family, shards)``: a copy of a good checkpoint."""

    def copy(family: str = "qwen3_moe", shards: int = 1) -> Path:
        return Path(shutil.copytree(_originals[family, shards], tmp_path / f"{family}-{shards}"))

    return copy
