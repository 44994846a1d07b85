"""The header of one safetensors file: read, and believed only after every claim was checked.

A file is ``u64 n`` (little-endian), n bytes of JSON, then the tensors' bytes. The JSON maps a name
to ``{"dtype", "shape", "data_offsets": [begin, end]}``, offsets counted from the first byte after
the JSON; ``__metadata__`` maps text to text. The tensors must cover those bytes exactly: no hole,
no overlap, nothing after the last. Nothing is allocated from a number that was not compared with
the size of the file first.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from moet.checkpoint.faults import BrokenCheckpoint, Fault, require_regular

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own implementation
METADATA = "__metadata__"

# Bits an element. FP4 and FP6 elements are packed: a tensor of them must fill whole bytes.
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor's bytes are.

    Attributes:
        dtype: a key of ``DTYPE_BITS``.
        offset: of the first byte, from the start of the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header. ``tensors`` is ordered by offset."""

    file: Path
    file_bytes: int
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


class _DuplicateKeyError(ValueError):
    """A JSON object has the key ``args[0]`` twice."""


def _is_text(value: Any) -> bool:
    """False for half a surrogate pair, which JSON can spell and UTF-8 cannot."""
    return not isinstance(value, str) or not any("\ud800" <= c <= "\udfff" for c in value)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if not all(_is_text(key) and _is_text(value) for key, value in pairs):
        raise ValueError("half a surrogate pair is not text")
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        raise _DuplicateKeyError(next(k for k, _ in pairs if k in seen or seen.add(k)))  # type: ignore[func-returns-value]
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def strict_json(raw: bytes, file: Path | str, not_json: Fault = Fault.NOT_JSON) -> Any:
    """Parses UTF-8 JSON; a repeated key, NaN or a lone surrogate is an error.

    Raises:
        BrokenCheckpoint: NOT_UTF8, DUPLICATE_KEY, or ``not_json``.
    """
    try:
        return json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique_pairs, parse_constant=_no_constant
        )
    except UnicodeDecodeError as error:
        what = f"byte {error.start} of the JSON is not UTF-8"
        raise BrokenCheckpoint(Fault.NOT_UTF8, file, what) from error
    except _DuplicateKeyError as error:
        what = f"the key {error.args[0]!r} appears twice"
        raise BrokenCheckpoint(Fault.DUPLICATE_KEY, file, what) from error
    except RecursionError as error:
        raise BrokenCheckpoint(not_json, file, "the JSON is nested without end") from error
    except ValueError as error:
        raise BrokenCheckpoint(not_json, file, f"not JSON: {error}") from error


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _metadata(value: Any, file: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise BrokenCheckpoint(Fault.BAD_METADATA, file, "__metadata__ must map text to text")
    return value


def _nbytes(dtype: str, shape: list[int], name: str, file: Path) -> int:
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8:
        what = f"{name}: {dtype} of shape {shape} does not fill whole bytes"
        raise BrokenCheckpoint(Fault.SIZE_MISMATCH, file, what)
    return bits // 8


def _entry(name: str, value: Any, base: int, file: Path) -> TensorInfo:
    """One tensor of the JSON; its place is checked against the others' later."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        what = f"{name!r} must have exactly dtype, shape and data_offsets"
        raise BrokenCheckpoint(Fault.BAD_ENTRY, file, what)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise BrokenCheckpoint(Fault.UNKNOWN_DTYPE, file, f"{name!r} has dtype {dtype!a}")
    if not isinstance(shape, list) or len(shape) > 32 or not all(map(_is_count, shape)):
        raise BrokenCheckpoint(Fault.BAD_SHAPE, file, f"{name!r} has the shape {str(shape)[:80]!a}")
    good = isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_count, offsets))
    if not good or offsets[0] > offsets[1]:
        what = f"{name!r} has data_offsets {str(offsets)[:80]!a}"
        raise BrokenCheckpoint(Fault.BAD_OFFSETS, file, what)
    nbytes = _nbytes(dtype, shape, name, file)
    if nbytes != offsets[1] - offsets[0]:
        what = f"{name!r}: {dtype} {shape} is {nbytes} bytes, its offsets {offsets} are not"
        raise BrokenCheckpoint(Fault.SIZE_MISMATCH, file, what)
    return TensorInfo(name, file, dtype, tuple(shape), base + offsets[0], nbytes)


def _check_cover(tensors: list[TensorInfo], base: int, file_bytes: int, file: Path) -> None:
    """The tensors, in order of offset, cover [base, file_bytes) exactly."""
    end = base
    for info in tensors:
        if info.offset != end:
            fault = Fault.OVERLAP if info.offset < end else Fault.HOLE
            what = f"{info.name!r} starts at byte {info.offset}, the tensor before it ends at {end}"
            raise BrokenCheckpoint(fault, file, what)
        end += info.nbytes
    if end != file_bytes:
        fault = Fault.TRUNCATED if end > file_bytes else Fault.TRAILING_BYTES
        what = f"its header describes {end} bytes, the file has {file_bytes}"
        raise BrokenCheckpoint(fault, file, what)


def check_length(prefix: bytes, file_bytes: int, file: Path) -> int:
    """The header's length from the first 8 bytes of a file of ``file_bytes`` bytes.

    Raises:
        BrokenCheckpoint: TOO_SHORT, LFS_POINTER, HEADER_TOO_LONG or HEADER_PAST_END.
    """
    if len(prefix) < 8:
        raise BrokenCheckpoint(Fault.TOO_SHORT, file, f"{file_bytes} bytes hold no header")
    if prefix == b"version ":
        raise BrokenCheckpoint(Fault.LFS_POINTER, file, "a git-lfs pointer instead of the weights")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        what = f"a header of {length} bytes is longer than the format's {MAX_HEADER_BYTES}"
        raise BrokenCheckpoint(Fault.HEADER_TOO_LONG, file, what)
    if length > file_bytes - 8:
        what = f"a header of {length} bytes in a file of {file_bytes}"
        raise BrokenCheckpoint(Fault.HEADER_PAST_END, file, what)
    return length


def parse_header(raw: bytes, file_bytes: int, file: Path) -> Header:
    """Checks the JSON of a header.

    Args:
        raw: the JSON, without the 8 bytes before it.
        file_bytes: size of the whole file.
        file: for the messages and for ``TensorInfo.file``.

    Raises:
        BrokenCheckpoint: one of the faults of a single file.
    """
    if not raw.startswith(b"{"):
        raise BrokenCheckpoint(Fault.NOT_AN_OBJECT, file, "the header does not start with '{'")
    entries = strict_json(raw, file)
    metadata = _metadata(entries.pop(METADATA, {}), file)
    base = 8 + len(raw)
    tensors = [_entry(name, value, base, file) for name, value in entries.items()]
    # An empty tensor shares its offset with the one after it: the empty one comes first.
    tensors.sort(key=lambda t: (t.offset, t.nbytes))
    _check_cover(tensors, base, file_bytes, file)
    return Header(file, file_bytes, {t.name: t for t in tensors}, metadata)


def read_header(file: Path) -> Header:
    """Reads and checks the header of one file.

    Raises:
        BrokenCheckpoint: one of the faults of a single file.
    """
    try:
        require_regular(file)
        with file.open("rb") as stream:
            file_bytes = stream.seek(0, 2)
            stream.seek(0)
            length = check_length(stream.read(8), file_bytes, file)
            raw = stream.read(length)
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise BrokenCheckpoint(Fault.UNREADABLE, file, what) from error
    return parse_header(raw, file_bytes, file)
