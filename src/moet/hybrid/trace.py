"""Routing traces: which experts the calls of a model asked for. Recorded, read, or made.

A file is lines of JSON (gzip where the name ends in .gz): a header, then one line a call of a
layer, in the order in which they ran. It keeps what decides about reads, not where a token went:

    {"format": "moet-trace-1", "model": {"moe_layers": [..], "experts": E, "top_k": K, ..}}
    [layer, tokens, [experts that decode asked for], [experts that only prefill asked for]]

A step is over when a layer comes that is not behind the last one.
"""

from __future__ import annotations

import gzip
import io
import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import UsageError
from moet.checkpoint.geometry import ModelGeometry
from moet.hybrid.heat import model_identity

FORMAT: Final = "moet-trace-1"
_HINT: Final = "record a trace again, or make one: moet replay --help"
_LONGEST_LINE: Final = 1 << 20


class Call(NamedTuple):
    """A call of one layer.

    Attributes:
        layer: of the model.
        tokens: how many it had.
        decode: experts that decoding tokens asked for, ascending.
        prefill: experts that only tokens of a prefill asked for, ascending.
    """

    layer: int
    tokens: int
    decode: tuple[int, ...]
    prefill: tuple[int, ...] = ()


class Trace(NamedTuple):
    """A trace, read or made.

    Attributes:
        layers: MoE layers of the model, ascending.
        experts: of a layer, E.
        top_k: experts a token.
        calls: in their order.
    """

    layers: tuple[int, ...]
    experts: int
    top_k: int
    calls: list[Call]


class TraceRecorder:
    """Writes a trace while a model runs: hand ``watch`` to `cold.plan`. Any thread may call.

    Args:
        path: a new file.
        geometry: of the model.
        most_calls: after so many it stops.

    Raises:
        UsageError: the file cannot be written, or is there already.
    """

    def __init__(self, path: Path, geometry: ModelGeometry, most_calls: int = 1_000_000) -> None:
        self.path = path
        self.calls = 0
        self._most = most_calls
        self._lock = threading.Lock()
        try:
            self._stream: TextIO | None = _open(path, "x")
        except OSError as error:
            what = f"{path}: the trace cannot be written: {error.strerror or error}"
            raise UsageError(
                what, hint="name a new file in a folder that can be written"
            ) from error
        header = {"format": FORMAT, "model": model_identity(geometry)}
        self._stream.write(json.dumps(header, separators=(",", ":")) + "\n")

    def watch(self, layer: int, ids: NDArray[np.int32], prefill: bool | NDArray[np.bool_]) -> None:
        """Notes a call.

        Args:
            layer: of the model.
            ids: int32 [T, K]; negative = empty slot.
            prefill: which tokens are of a prefill, [T], or all or none.
        """
        swept = np.broadcast_to(np.asarray(prefill, np.bool_), len(ids))
        decode, every = _experts(ids[~swept]), _experts(ids)
        line = json.dumps(
            [layer, len(ids), decode, sorted(set(every) - set(decode))], separators=(",", ":")
        )
        with self._lock:
            if self._stream and self.calls < self._most:
                self.calls += 1
                self._stream.write(line + "\n")

    def close(self) -> None:
        """Ends the file; the second time does nothing."""
        with self._lock:
            stream, self._stream = self._stream, None
        if stream:
            stream.close()

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _experts(ids: NDArray[np.int32]) -> list[int]:
    found: list[int] = np.unique(ids[ids >= 0]).tolist()
    return found


def _open(path: Path, mode: Literal["r", "x"]) -> TextIO:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.GzipFile(path, f"{mode}b"), encoding="utf-8")
    return path.open(mode, encoding="utf-8")


def read_trace(path: Path) -> Trace:
    """Reads a trace.

    Raises:
        UsageError: unreadable, or not a trace; names the line.
    """
    try:
        with _open(path, "r") as stream:
            lines = iter(lambda: stream.readline(_LONGEST_LINE), "")
            trace = _header(path, next(lines, ""))
            trace.calls.extend(_calls(path, trace, lines))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        what = f"{path}: the trace cannot be read: {error}"
        raise UsageError(what, hint=_HINT) from error
    if not trace.calls:
        raise UsageError(f"{path} has no calls", hint=_HINT)
    return trace


def _json(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}, line {number}: not JSON", hint=_HINT) from error


def _header(path: Path, line: str) -> Trace:
    header = _json(path, 1, line)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise UsageError(f"{path} is not a trace of format {FORMAT}", hint=_HINT)
    model = header.get("model")
    fields: dict[str, Any] = model if isinstance(model, dict) else {}
    layers: Any = fields.get("moe_layers")
    experts: Any = fields.get("experts")
    top_k: Any = fields.get("top_k")
    numbers = isinstance(layers, list) and all(map(_natural, layers))
    if not (numbers and layers and layers == sorted(set(layers))):
        raise UsageError(f"{path}: moe_layers {layers!r:.60} are no layers", hint=_HINT)
    if not (_natural(experts) and _natural(top_k) and 0 < top_k <= experts < 1 << 20):
        what = f"{path}: experts {experts!r:.40}, top_k {top_k!r:.40} cannot be"
        raise UsageError(what, hint=_HINT)
    return Trace(tuple(layers), experts, top_k, [])


def _natural(value: Any) -> bool:
    return type(value) is int and value >= 0


def _calls(path: Path, trace: Trace, lines: Iterable[str]) -> Iterator[Call]:
    layers = set(trace.layers)
    for number, line in enumerate(lines, start=2):
        call = _json(path, number, line)
        if not _is_call(call, layers, trace.experts):
            raise UsageError(f"{path}, line {number} is no call: {line.strip():.60}", hint=_HINT)
        yield Call(call[0], call[1], tuple(call[2]), tuple(call[3]))


def _is_call(call: Any, layers: set[int], experts: int) -> bool:
    if not (isinstance(call, list) and len(call) == 4 and all(map(_natural, call[:2]))):
        return False
    if call[0] not in layers or not all(isinstance(part, list) for part in call[2:]):
        return False
    ids = [*call[2], *call[3]]
    return all(_natural(i) and i < experts for i in ids) and len(set(ids)) == len(ids)


def steps(calls: Iterable[Call]) -> Iterator[list[Call]]:
    """Calls by steps of the model."""
    step: list[Call] = []
    for call in calls:
        if step and call.layer <= step[-1].layer:
            yield step
            step = []
        step.append(call)
    if step:
        yield step


def count_heat(trace: Trace, calls: Iterable[Call]) -> NDArray[np.int64]:
    """How many decode calls asked for each expert, [layers, experts]."""
    row = {layer: i for i, layer in enumerate(trace.layers)}
    counts = np.zeros((len(trace.layers), trace.experts), np.int64)
    for call in calls:
        counts[row[call.layer], list(call.decode)] += 1
    return counts
