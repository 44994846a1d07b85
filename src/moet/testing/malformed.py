"""Safetensors files and checkpoint folders that are wrong, each in one way that has a name.

``FILES`` holds whole files; ``FOLDERS`` holds functions that spoil a good folder. Together they
cover every ``Fault`` that reading can meet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moet.checkpoint.faults import Fault
from moet.checkpoint.geometry import CONFIG
from moet.checkpoint.header import MAX_HEADER_BYTES
from moet.checkpoint.shards import INDEX

Entry = dict[str, Any]


def entry(begin: int, end: int, dtype: Any = "U8", shape: Any = None) -> Entry:
    """A tensor of the header; by default one row of bytes."""
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file_of(header: Any, data: bytes = b"") -> bytes:
    """A file with a header: JSON text, bytes, or an object to be dumped."""
    text = header if isinstance(header, str | bytes) else json.dumps(header)
    raw = text.encode() if isinstance(text, str) else text
    return len(raw).to_bytes(8, "little") + raw + data


def _long(nbytes: int) -> bytes:
    return nbytes.to_bytes(8, "little") + b"{}"


_TWO = {"a": entry(0, 4), "b": entry(4, 8)}
_EIGHT = bytes(8)

# name: (what it must be called, the file)
FILES: dict[str, tuple[Fault, bytes]] = {
    "empty file": (Fault.TOO_SHORT, b""),
    "seven bytes": (Fault.TOO_SHORT, b"\x02\0\0\0\0\0\0"),
    "git-lfs pointer": (
        Fault.LFS_POINTER,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
    ),
    "length over the limit": (Fault.HEADER_TOO_LONG, _long(MAX_HEADER_BYTES + 1)),
    "length of all ones": (Fault.HEADER_TOO_LONG, _long(2**64 - 1)),
    "length past the end": (Fault.HEADER_PAST_END, _long(3)),
    "length zero": (Fault.NOT_AN_OBJECT, _long(0)),
    "a list": (Fault.NOT_AN_OBJECT, file_of([])),
    "leading space": (Fault.NOT_AN_OBJECT, file_of(" {}")),
    "latin-1": (Fault.NOT_UTF8, file_of(b'{"\xe9":1}')),
    "JSON cut short": (Fault.NOT_JSON, file_of('{"a":')),
    "JSON twice": (Fault.NOT_JSON, file_of("{}{}")),
    "NaN": (Fault.NOT_JSON, file_of('{"a":NaN}')),
    "deep nesting": (Fault.NOT_JSON, file_of('{"a":' + "[" * 200_000)),
    "a number of 5000 digits": (
        Fault.NOT_JSON,
        file_of('{"a":{"dtype":"U8","shape":[%s],"data_offsets":[0,0]}}' % ("9" * 5000)),
    ),
    "a tensor twice": (
        Fault.DUPLICATE_KEY,
        file_of(f'{{"a":{json.dumps(entry(0, 4))},"a":{json.dumps(entry(4, 8))}}}', _EIGHT),
    ),
    "a field twice": (
        Fault.DUPLICATE_KEY,
        file_of('{"a":{"dtype":"U8","dtype":"I8","shape":[8],"data_offsets":[0,8]}}', _EIGHT),
    ),
    "metadata is a list": (Fault.BAD_METADATA, file_of({"__metadata__": []})),
    "metadata holds a number": (Fault.BAD_METADATA, file_of({"__metadata__": {"a": 1}})),
    "half a surrogate pair": (Fault.NOT_JSON, file_of({"\ud800": entry(0, 8)}, _EIGHT)),
    "half a surrogate pair in the metadata": (
        Fault.NOT_JSON,
        file_of({"__metadata__": {"a": "\ud800"}}),
    ),
    "entry is a list": (Fault.BAD_ENTRY, file_of({"a": [0, 8]}, _EIGHT)),
    "entry without dtype": (
        Fault.BAD_ENTRY,
        file_of({"a": {"shape": [8], "data_offsets": [0, 8]}}, _EIGHT),
    ),
    "entry with more": (Fault.BAD_ENTRY, file_of({"a": {**entry(0, 8), "strides": [1]}}, _EIGHT)),
    "unknown dtype": (Fault.UNKNOWN_DTYPE, file_of({"a": entry(0, 8, "F128")}, _EIGHT)),
    "dtype is a number": (Fault.UNKNOWN_DTYPE, file_of({"a": entry(0, 8, 8)}, _EIGHT)),
    "negative dimension": (
        Fault.BAD_SHAPE,
        file_of({"a": entry(0, 8, shape=[-2, -4])}, _EIGHT),
    ),
    "fractional dimension": (Fault.BAD_SHAPE, file_of({"a": entry(0, 8, shape=[8.0])}, _EIGHT)),
    "dimension is true": (Fault.BAD_SHAPE, file_of({"a": entry(0, 1, shape=[True])}, b"\0")),
    "dimension of 2^63": (Fault.BAD_SHAPE, file_of({"a": entry(0, 8, shape=[2**63, 0])}, _EIGHT)),
    "shape is a number": (Fault.BAD_SHAPE, file_of({"a": entry(0, 8, shape=8)}, _EIGHT)),
    "a hundred dimensions": (Fault.BAD_SHAPE, file_of({"a": entry(0, 1, shape=[1] * 100)}, b"\0")),
    "three offsets": (
        Fault.BAD_OFFSETS,
        file_of({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 4, 8]}}, _EIGHT),
    ),
    "negative offset": (Fault.BAD_OFFSETS, file_of({"a": entry(-8, 0)}, _EIGHT)),
    "offsets backwards": (Fault.BAD_OFFSETS, file_of({"a": entry(8, 0, shape=[8])}, _EIGHT)),
    "offset is text": (
        Fault.BAD_OFFSETS,
        file_of({"a": {"dtype": "U8", "shape": [8], "data_offsets": ["0", "8"]}}, _EIGHT),
    ),
    "shape and offsets differ": (Fault.SIZE_MISMATCH, file_of({"a": entry(0, 8, "U16")}, _EIGHT)),
    "shape overflows 64 bits": (
        Fault.SIZE_MISMATCH,
        file_of({"a": entry(0, 8, "U64", [2**62, 2**62])}, _EIGHT),
    ),
    "half a byte": (Fault.SIZE_MISMATCH, file_of({"a": entry(0, 2, "F4", [3])}, b"\0\0")),
    "overlap": (Fault.OVERLAP, file_of({"a": entry(0, 5), "b": entry(4, 8)}, _EIGHT)),
    "same place": (Fault.OVERLAP, file_of({"a": entry(0, 8), "b": entry(0, 8)}, _EIGHT)),
    "hole at the start": (Fault.HOLE, file_of({"a": entry(1, 8)}, _EIGHT)),
    "hole in the middle": (Fault.HOLE, file_of({"a": entry(0, 3), "b": entry(4, 8)}, _EIGHT)),
    "a byte short": (Fault.TRUNCATED, file_of(_TWO, bytes(7))),
    "no data": (Fault.TRUNCATED, file_of(_TWO)),
    "a byte too many": (Fault.TRAILING_BYTES, file_of(_TWO, bytes(9))),
    "data without tensors": (Fault.TRAILING_BYTES, file_of({}, b"\0")),
}


def _edit_json(file: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _edit_header(file: Path, change: Callable[[Any], None]) -> None:
    """Changes the JSON of a shard and leaves its data."""
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    change(header)
    file.write_bytes(file_of(header, raw[end:]))


def _expert_name(header: dict[str, Any]) -> str:
    return next(name for name in header if "experts" in name and "shared" not in name)


def _rename_expert(header: dict[str, Any]) -> None:
    name = _expert_name(header)
    header["lost." + name] = header.pop(name)


def _reshape_expert(header: dict[str, Any]) -> None:
    shape = header[_expert_name(header)]["shape"]
    shape[:] = [shape[0] * shape[1], *shape[2:], 1]


def _retype_expert(header: dict[str, Any]) -> None:
    header[_expert_name(header)]["dtype"] = "F8_E4M3"


def _edit_first(change: Callable[[Any], None]) -> Callable[[Path], None]:
    """Spoils the header of the shard in which the first expert tensor lies."""

    def spoil(folder: Path) -> None:
        for file in _shards(folder):
            raw = file.read_bytes()
            if b"experts" in raw[: 8 + int.from_bytes(raw[:8], "little")]:
                _edit_header(file, change)
                (folder / INDEX).unlink(missing_ok=True)
                return

    return spoil


def _edit_config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: _edit_json(folder / CONFIG, lambda config: config.update(values))


def _edit_index(change: Callable[[Any], None]) -> Callable[[Path], None]:
    return lambda folder: _edit_json(folder / INDEX, change)


def _stale_copy(folder: Path) -> None:
    (folder / "stale.safetensors").write_bytes(_shards(folder)[0].read_bytes())


def _no_weights(folder: Path) -> None:
    for file in (*_shards(folder), folder / INDEX):
        file.unlink()


def _truncate(folder: Path) -> None:
    file = _shards(folder)[0]
    os.truncate(file, file.stat().st_size - 1)


def _as_gguf(folder: Path) -> None:
    _no_weights(folder)
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF\3\0\0\0")


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return spoil


# name: (what it must be called, what spoils a good qwen3_moe folder that has an index)
FOLDERS: dict[str, tuple[Fault, Callable[[Path], None]]] = {
    "no config": (Fault.UNREADABLE, lambda f: (f / CONFIG).unlink()),
    "config is not JSON": (Fault.BAD_CONFIG, _write(CONFIG, b"{")),
    "config is a list": (Fault.BAD_CONFIG, _write(CONFIG, b"[]")),
    "no hidden size": (Fault.BAD_CONFIG, _edit_config(hidden_size=None)),
    "hidden size is text": (Fault.BAD_CONFIG, _edit_config(hidden_size="64")),
    "negative layers": (Fault.BAD_CONFIG, _edit_config(num_hidden_layers=-1)),
    "absurd experts": (Fault.BAD_CONFIG, _edit_config(num_experts=10**12)),
    "top-k over the experts": (Fault.BAD_CONFIG, _edit_config(num_experts_per_tok=1000)),
    "quantisation is a word": (Fault.BAD_CONFIG, _edit_config(quantization_config="mxfp4")),
    "dense layers are a word": (Fault.BAD_CONFIG, _edit_config(mlp_only_layers="all")),
    "unknown architecture": (Fault.UNKNOWN_ARCHITECTURE, _edit_config(model_type="llama")),
    "no architecture": (Fault.UNKNOWN_ARCHITECTURE, _edit_config(model_type=None)),
    "no experts": (Fault.NO_EXPERTS, _edit_config(num_experts=0)),
    "all layers dense": (Fault.NO_EXPERTS, _edit_config(mlp_only_layers=list(range(64)))),
    "bf16 experts": (Fault.UNSUPPORTED_EXPERTS, _edit_config(quantization_config=None)),
    "fp8 experts": (
        Fault.UNSUPPORTED_EXPERTS,
        _edit_config(quantization_config={"quant_method": "fp8"}),
    ),
    "nvfp4 experts": (
        Fault.UNSUPPORTED_EXPERTS,
        _edit_config(quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    ),
    "unknown quantisation": (
        Fault.UNSUPPORTED_EXPERTS,
        _edit_config(quantization_config={"quant_method": "secret"}),
    ),
    "unknown activation": (Fault.UNSUPPORTED_EXPERTS, _edit_config(hidden_act="relu2")),
    "half a block": (Fault.UNSUPPORTED_EXPERTS, _edit_config(moe_intermediate_size=48)),
    "config of a wider model": (Fault.WRONG_SHAPE, _edit_config(hidden_size=128)),
    "config with more experts": (Fault.MISSING_EXPERT, _edit_config(num_experts=99)),
    "config with more layers": (Fault.MISSING_EXPERT, _edit_config(num_hidden_layers=9)),
    "config with fewer experts": (Fault.EXTRA_EXPERT, _edit_config(num_experts=3)),
    "config with fewer layers": (Fault.EXTRA_EXPERT, _edit_config(num_hidden_layers=1)),
    "no weights": (Fault.NO_WEIGHTS, _no_weights),
    "GGUF": (Fault.GGUF, _as_gguf),
    "no index": (Fault.NO_INDEX, lambda f: (f / INDEX).unlink()),
    "index is not JSON": (Fault.BAD_INDEX, _write(INDEX, b"weights")),
    "index without a map": (Fault.BAD_INDEX, _write(INDEX, b'{"metadata":{}}')),
    "index with a path": (
        Fault.BAD_SHARD_NAME,
        _edit_index(lambda i: i["weight_map"].update(x="../model.safetensors")),
    ),
    "index with a number": (
        Fault.BAD_SHARD_NAME,
        _edit_index(lambda i: i["weight_map"].update(x=1)),
    ),
    "missing shard": (Fault.MISSING_SHARD, lambda f: _shards(f)[1].unlink()),
    "index names a tensor too many": (
        Fault.MISSING_TENSOR,
        _edit_index(lambda i: i["weight_map"].update(x=next(iter(i["weight_map"].values())))),
    ),
    "tensor in another shard": (
        Fault.MISSING_TENSOR,
        _edit_index(
            lambda i: i["weight_map"].update(
                {next(iter(i["weight_map"])): max(i["weight_map"].values())}
            )
        ),
    ),
    "stale shard with the same names": (Fault.DUPLICATE_TENSOR, _stale_copy),
    "truncated shard": (Fault.TRUNCATED, _truncate),
}

# The same, for a folder with one file and no index.
SINGLE_FOLDERS: dict[str, tuple[Fault, Callable[[Path], None]]] = {
    "expert renamed": (Fault.MISSING_EXPERT, _edit_first(_rename_expert)),
    "expert of another shape": (Fault.WRONG_SHAPE, _edit_first(_reshape_expert)),
    "expert of another type": (Fault.WRONG_DTYPE, _edit_first(_retype_expert)),
}
