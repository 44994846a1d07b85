"""How often each expert was asked for: counts a layer, and the file that keeps them.

The file is JSON: ``{"format": "moet-heat-1", "model": {...}, "counts": {"<layer>": [...]}}``. The
model is named by its geometry: heat of a fine-tune with the same shapes is fair to use, since heat
decides where an expert lies and never what it computes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moet.base.errors import MoetError, UsageError
from moet.checkpoint.geometry import ModelGeometry
from moet.checkpoint.header import strict_json

FORMAT: Final = "moet-heat-1"
_MOST_BYTES: Final = 64 << 20
_MOST_COUNT: Final = 1 << 63
_HINT: Final = "record the heat again with this model, or serve without a heat file"

Heat = Mapping[int, tuple[int, ...]]
"""Layer -> how many tokens each expert was given."""


def model_identity(geometry: ModelGeometry) -> dict[str, Any]:
    """What a heat file says about its model."""
    return {
        "architecture": geometry.architecture,
        "hidden": geometry.hidden,
        "intermediate": geometry.intermediate,
        "experts": geometry.experts,
        "top_k": geometry.top_k,
        "moe_layers": list(geometry.moe_layers),
    }


def write_heat(path: Path, geometry: ModelGeometry, heat: Heat) -> None:
    """Writes a heat file, whole or not at all: a temporary file, synced and renamed.

    Raises:
        UsageError: counts that do not fit the model, or the file cannot be written.
    """
    _check_counts(path, geometry, heat)
    counts = {str(layer): list(heat[layer]) for layer in sorted(heat)}
    record = {"format": FORMAT, "model": model_identity(geometry), "counts": counts}
    try:
        _replace(path, json.dumps(record, separators=(",", ":")).encode())
    except OSError as error:
        what = f"{path}: the heat cannot be written: {error.strerror or error}"
        raise UsageError(what, hint="name a file in a folder that can be written") from error


def _replace(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read_heat(path: Path, geometry: ModelGeometry) -> Heat:
    """Reads a heat file of this model.

    Raises:
        UsageError: unreadable, not a heat file, of another model, or with impossible counts; names
            the file and the field.
    """
    record = _read_json(path)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UsageError(f"{path} is not a heat file of format {FORMAT}", hint=_HINT)
    if set(record) != {"format", "model", "counts"}:
        raise UsageError(f"{path}: fields {sorted(record)} are not a heat file's", hint=_HINT)
    _check_model(path, geometry, record["model"])
    heat = _parse_counts(path, record["counts"])
    _check_counts(path, geometry, heat)
    return heat


def _read_json(path: Path) -> Any:
    try:
        if not path.is_file():
            raise UsageError(f"there is no heat file {path}", hint=_HINT)
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} is too large for a heat file", hint=_HINT)
        raw = path.read_bytes()
    except OSError as error:
        what = f"{path}: the heat cannot be read: {error.strerror or error}"
        raise UsageError(what, hint=_HINT) from error
    try:
        return strict_json(raw, path)
    except MoetError as error:
        raise UsageError(f"not a heat file: {error}", hint=_HINT) from error


def _check_model(path: Path, geometry: ModelGeometry, found: Any) -> None:
    wanted = model_identity(geometry)
    if not isinstance(found, dict):
        raise UsageError(f"{path}: model is not an object", hint=_HINT)
    odd = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
    if odd:
        said = ", ".join(f"{k} {found.get(k)!r:.60}, not {wanted.get(k)!r:.60}" for k in odd[:3])
        raise UsageError(f"{path} is the heat of another model: {said}", hint=_HINT)


def _parse_counts(path: Path, counts: Any) -> Heat:
    if not isinstance(counts, dict):
        raise UsageError(f"{path}: counts is not an object", hint=_HINT)
    heat = {}
    for name, values in counts.items():
        if not name.isdecimal() or not name.isascii() or str(int(name)) != name:
            raise UsageError(f"{path}: counts has a layer {name!r:.40}", hint=_HINT)
        if not isinstance(values, list):
            raise UsageError(f"{path}: the counts of layer {name} are not a list", hint=_HINT)
        heat[int(name)] = tuple(values)
    return heat


def _check_counts(path: Path, geometry: ModelGeometry, heat: Heat) -> None:
    if set(heat) != set(geometry.moe_layers):
        odd = sorted(set(heat) ^ set(geometry.moe_layers))
        what = f"{path}: counts are missing or too many for layers {odd[:8]}"
        raise UsageError(what, hint=_HINT)
    for layer, counts in heat.items():
        if len(counts) != geometry.experts:
            what = f"{path}: layer {layer} has {len(counts)} counts, not {geometry.experts}"
            raise UsageError(what, hint=_HINT)
        bad = [c for c in counts if type(c) is not int or not 0 <= c < _MOST_COUNT]
        if bad:
            raise UsageError(f"{path}: layer {layer} has a count of {bad[0]!r:.40}", hint=_HINT)
