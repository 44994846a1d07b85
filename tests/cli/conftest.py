from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Moet = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def moet(tmp_path: Path) -> Moet:
    """Runs ``moet`` in a process of its own, with pipes and with places of its own."""
    (tmp_path / "run").mkdir(mode=0o700)

    def run(*arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MOET_", "COLUMNS"))}
        ours = {"XDG_RUNTIME_DIR": str(tmp_path / "run"), "MOET_CACHE_DIR": str(tmp_path / "cache")}
        return subprocess.run(
            [sys.executable, "-m", "moet", *arguments],
            env={**kept, **ours, **variables},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )

    return run
