from __future__ import annotations

import os
from pathlib import Path

import pytest

from moet.base.errors import EngineError
from moet.engine import enginelog

LOG = """(EngineCore pid=7) ERROR 12-01 [core.py:9] EngineCore failed to start.
(EngineCore pid=7) ERROR 12-01 [core.py:9] Traceback (most recent call last):
(EngineCore pid=7) ERROR 12-01 [core.py:9] ValueError: No available memory for the cache blocks.
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_the_cause_is_found_behind_a_vague_failure(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("x" * enginelog.TAIL_BYTES + LOG)
    assert enginelog.cause(log) == "ValueError: No available memory for the cache blocks."
    assert enginelog.is_vague("vLLM has ended: Engine core initialization failed. See above.")
    assert not enginelog.is_vague("no room for the model")


def test_a_warning_that_quotes_an_error_is_not_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    warning = "(A pid=1) WARNING 12-01 [utils.py:2] failed, `OSError: [Errno 24] Too many`. Go on"
    bare = "(EngineCore pid=7) ERROR 12-01 14:56:34 [core.py:9] AssertionError"
    log.write_text(f"{warning}\n{bare}\nRuntimeError: {enginelog.VAGUE}\n")
    assert enginelog.cause(log) == "AssertionError"


def test_a_log_without_an_error_has_no_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("RuntimeError: Engine core initialization failed.\nall is well\n")
    assert enginelog.cause(log) == ""
    assert enginelog.cause(None) == ""


def test_a_few_logs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOET_CACHE_DIR", str(tmp_path))
    for number in range(8):
        path, file = enginelog.create(f"serve-{number}.log")
        file.close()
        os.utime(path, (number, number))
    assert {p.name for p in (tmp_path / "logs").iterdir()} == {
        f"serve-{number}.log" for number in (3, 4, 5, 6, 7)
    }


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOET_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(EngineError, match="no log can be written") as error:
        enginelog.create("serve-0.log")
    assert "MOET_CACHE_DIR" in error.value.hint
