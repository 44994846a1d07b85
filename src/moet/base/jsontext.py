"""JSON that every reader takes: the standard has no NaN and no infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def finite(value: Any) -> Any:
    """A copy of a JSON value with null for every float that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value


def dumps(value: Any, indent: int | None = 2) -> str:
    """One JSON value as text. Not finite: null."""
    return json.dumps(finite(value), indent=indent, allow_nan=False)
