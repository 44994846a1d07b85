"""The one file that knows vLLM's versions, and the entry point, with and without vLLM."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from moet.base.errors import EngineError, UnsupportedError
from moet.engine import versions


@pytest.mark.parametrize("path", ["nowhere.at.all:thing", "math:nothing"])
def test_an_absent_hook_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda: "0.99.1")
    with pytest.raises(EngineError, match=rf"vLLM 0\.99\.1 has no {path}") as caught:
        versions.hook(path)
    assert "pip install" in caught.value.hint


@pytest.mark.parametrize("version", ["0.26.0", "0.31.9", "0.9.0"])
def test_old_engines_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda: version)
    with pytest.raises(UnsupportedError, match=version):
        versions.check()


@pytest.mark.parametrize(
    ("version", "warned"), [("0.32.0", False), ("0.33.1", True), ("1.0", True)]
)
def test_new_engines_are_told_apart(
    version: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "version", lambda: version)
    versions.check()
    assert (f"vLLM {version} is newer" in caplog.text) is warned


def test_the_entry_point_is_installed() -> None:
    points = importlib.metadata.entry_points(group="vllm.general_plugins", name="moet")
    assert [point.value for point in points] == ["moet.engine.plugin:register"]
    assert callable(next(iter(points)).load())


def test_the_entry_point_imports_nothing_heavy() -> None:
    """vLLM loads it in every process, also in those that never see a model."""
    code = "import sys, moet.engine.plugin; print({'torch', 'vllm', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "set()"
