from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from moet.engine.apiserver import plain


class Config(BaseModel):
    length: int

    @field_validator("length")
    @classmethod
    def check(cls, value: int) -> int:
        raise ValueError(f"a length of {value} is too long")


def test_errors_of_pydantic_are_told_without_their_frame() -> None:
    with pytest.raises(ValidationError) as caught:
        Config(length=9)
    assert plain(caught.value) == "a length of 9 is too long"
    assert plain(RuntimeError("no memory")) == "no memory"
