"""Settings: known names are read, unknown ones and bad values are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from moet.base import env
from moet.base.errors import UsageError


def test_defaults_and_foreign_names() -> None:
    assert env.read({"PATH": "/bin", "HOME": "/"}) == env.Settings()


def test_values_are_typed() -> None:
    settings = env.read({"MOET_ISA": "avx2", "MOET_THREADS": "3", "MOET_CACHE_DIR": "/c"})
    assert (settings.isa, settings.threads, settings.cache_dir) == ("avx2", 3, Path("/c"))


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"MOET_THRAEDS": "3"}, "MOET_THRAEDS"),
        ({"MOET_THREADS": "two"}, "MOET_THREADS"),
        ({"MOET_THREADS": "-1"}, "MOET_THREADS"),
        ({"MOET_STALL_SECONDS": "soon"}, "MOET_STALL_SECONDS"),
        ({"MOET_STALL_SECONDS": "0"}, "MOET_STALL_SECONDS"),
        ({"MOET_STALL_SECONDS": "nan"}, "MOET_STALL_SECONDS"),
        ({"MOET_MAILBOX": "telepathy"}, "telepathy"),
        ({"MOET_API_KEY": "schlüssel"}, "MOET_API_KEY"),
        ({"MOET_API_KEY": "two words"}, "MOET_API_KEY"),
        ({"MOET_IO": "fast"}, "MOET_IO"),
        ({"MOET_CACHE_DIR": ""}, "MOET_CACHE_DIR"),
        ({"MOET_CACHE_DIR": "~no such user/x"}, "no such user"),
    ],
)
def test_bad_settings_are_refused_by_name(environ: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        env.read(environ)
    assert caught.value.hint
