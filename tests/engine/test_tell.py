"""Telling the supervisor: once where there is a page, and never in the way of the cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from moet.base.errors import EngineError, KernelError
from moet.engine import tell
from moet.engine.heartbeat import Page


def test_the_cause_is_told_and_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page.create(tmp_path / "beat")
    monkeypatch.setenv("MOET_HEARTBEAT", str(page.path))
    with pytest.raises(KernelError, match="the cause"), tell.telling():
        raise KernelError("the cause", hint="do this")
    assert page.failure is not None
    assert (str(page.failure), page.failure.hint) == ("the cause", "do this")


def test_a_page_that_is_gone_does_not_hide_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MOET_HEARTBEAT", str(tmp_path / "gone"))
    with pytest.raises(KernelError, match="the cause"), tell.telling():
        raise KernelError("the cause", hint="do this")
    assert "the cause cannot be told" in caplog.text
    with pytest.raises(EngineError, match="no heartbeat page"):
        tell.own_page()


def test_a_page_is_mapped_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Page.create(tmp_path / "beat")
    monkeypatch.setenv("MOET_HEARTBEAT", str(tmp_path / "beat"))
    assert tell.own_page() is tell.own_page()
