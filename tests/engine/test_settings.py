"""The section ``moet`` of vLLM's additional config."""

from __future__ import annotations

from typing import Any

import pytest

from moet.base.errors import UsageError
from moet.engine.settings import Arithmetic, EngineSettings, read


@pytest.mark.parametrize("config", [{}, {"moet": {}}, {"other": {"arithmetic": 1}}, None])
def test_defaults(config: Any) -> None:
    assert read(config) == EngineSettings(arithmetic=Arithmetic.KERNELS)


def test_reference() -> None:
    assert read({"moet": {"arithmetic": "reference"}}).arithmetic is Arithmetic.REFERENCE


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"arithmetics": "reference"}, r"unknown setting additional_config\.moet\.arithmetics"),
        ({"arithmetic": "torch"}, "torch"),
        ({"arithmetic": None}, "None"),
        ("reference", "not an object"),
        (["reference"], "not an object"),
    ],
)
def test_what_cannot_be_read_is_refused(section: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read({"moet": section})
    assert caught.value.hint
