"""The house rules that a tool can check: layers, lint, format, types, file sizes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent

TOOLS = {
    "layers": ["lint-imports", "--no-cache"],
    "lint": ["ruff", "check", "--no-cache", "."],
    "format": ["ruff", "format", "--no-cache", "--check", "."],
    "types": ["mypy"],
}


@pytest.mark.parametrize("rule", TOOLS)
def test_tool_is_content(rule: str) -> None:
    tool, *arguments = TOOLS[rule]
    if not (BIN / tool).exists():
        pytest.skip(f"{tool} is not installed in this environment")
    command = [BIN / tool, *arguments]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


NATIVE_ROOMS = {"kernels", "tiers", "pack", "machine", "hybrid"}


def test_only_the_lower_rooms_import_the_native_part() -> None:
    """import-linter does not see compiled modules, and not ``import_module`` either."""
    pattern = re.compile(
        r"^\s*(from moet import .*\b_core\b|import moet\._core)|\"moet\._core\"", re.M
    )
    rooms = {
        path.relative_to(ROOT / "src" / "moet").parts[0]
        for path in (ROOT / "src" / "moet").rglob("*.py")
        if pattern.search(path.read_text())
    }
    assert {"kernels", "machine"} <= rooms, "the pattern still finds them"
    assert rooms <= NATIVE_ROOMS


def test_source_files_are_pages() -> None:
    """House habit 1: a file past 500 lines says why, in a comment with the words 'Long because'."""
    long = [
        path.relative_to(ROOT)
        for folder in ("src", "csrc", "scripts", "training", "benchmarks", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".cpp", ".h", ".inl", ".cu"}
        and len(lines := path.read_text().splitlines()) > 500
        and not any("Long because" in line for line in lines[:40])
    ]
    assert long == []
