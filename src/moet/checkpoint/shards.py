"""The weight files of a folder and its index: which tensor is in which file, all agreeing.

What is refused: a shard that the index names and the folder lacks; a tensor that the index names
and its shard lacks, or that lies in another shard than the index says; a tensor that two files
hold, whether the index mentions the second file or not (which of them a reader picks would depend
on the reader). What is only reported, as a Finding: a file that the index does not mention and that
shares no name with it (a leftover costs space, not correctness), and a tensor of a mentioned shard
that the index leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moet.base.report import Finding, Level
from moet.checkpoint.faults import BrokenCheckpoint, Fault, require_regular
from moet.checkpoint.header import Header, TensorInfo, read_header, strict_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_INDEX_BYTES = 1 << 30


@dataclass(frozen=True)
class Shards:
    """Every tensor of a checkpoint, by name, and what is odd about its files."""

    folder: Path
    files: tuple[Path, ...]
    tensors: dict[str, TensorInfo]
    findings: tuple[Finding, ...]


def _read_small(file: Path, limit: int) -> bytes:
    try:
        require_regular(file)
        if file.stat().st_size > limit:
            raise BrokenCheckpoint(Fault.BAD_INDEX, file, f"more than {limit} bytes")
        return file.read_bytes()
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise BrokenCheckpoint(Fault.UNREADABLE, file, what) from error


def _check_shard_name(name: object, index: Path) -> None:
    plain = isinstance(name, str) and name.endswith(".safetensors") and "/" not in name
    if not plain or not str(name).isprintable():
        raise BrokenCheckpoint(Fault.BAD_SHARD_NAME, index, f"{name!a} is not a shard's file name")


def read_index(index: Path) -> dict[str, str]:
    """The weight map (tensor name to file name) of an index file.

    Raises:
        BrokenCheckpoint: UNREADABLE, BAD_INDEX, BAD_SHARD_NAME, DUPLICATE_KEY or NOT_UTF8.
    """
    content = strict_json(_read_small(index, _MAX_INDEX_BYTES), index, Fault.BAD_INDEX)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise BrokenCheckpoint(Fault.BAD_INDEX, index, "it has no weight_map")
    for name in {str(n): n for n in weight_map.values()}.values():
        _check_shard_name(name, index)
    return weight_map


def _merge(headers: Iterable[Header]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for name, info in header.tensors.items():
            other = tensors.setdefault(name, info)
            if other is not info:
                what = f"{name!r} is in {other.file.name} too"
                raise BrokenCheckpoint(Fault.DUPLICATE_TENSOR, header.file, what)
    return tensors


def _check_index(tensors: dict[str, TensorInfo], weight_map: dict[str, str], index: Path) -> None:
    for name, file in weight_map.items():
        info = tensors.get(name)
        if info is None or info.file.name != file:
            where = "is in no shard" if info is None else f"is in {info.file.name}"
            what = f"{name!r} should be in {file} and {where}"
            raise BrokenCheckpoint(Fault.MISSING_TENSOR, index, what)


def _unlisted(tensors: dict[str, TensorInfo], weight_map: dict[str, str]) -> list[Finding]:
    extra = sorted(tensors.keys() - weight_map.keys())
    if not extra:
        return []
    fact = f"{len(extra)} tensors are not in the index, {extra[0]!r} the first"
    fix = "download the index again"
    return [Finding(level=Level.WARN, topic="unlisted tensors", fact=fact, fix=fix)]


def _stray_files(folder: Path, used: set[str], tensors: dict[str, TensorInfo]) -> list[Finding]:
    """Files beside the index that it does not mention. Sharing a tensor name is an error."""
    findings = []
    for file in sorted(folder.glob("*.safetensors")):
        if file.name in used:
            continue
        try:
            names = read_header(file).tensors.keys()
            fact = f"{file.name} is not in the index and is not read"
        except BrokenCheckpoint as error:
            names = dict[str, TensorInfo]().keys()
            fact = f"{file.name} is not in the index and is damaged ({error.fault})"
        if shared := sorted(names & tensors.keys()):
            other = tensors[shared[0]].file.name
            what = f"not in the index, yet {shared[0]!r} is in it and in {other}"
            raise BrokenCheckpoint(Fault.DUPLICATE_TENSOR, file, what)
        finding = Finding(level=Level.WARN, topic="stray shard", fact=fact, fix="delete the file")
        findings.append(finding)
    return findings


def _indexed(folder: Path, index: Path) -> Shards:
    weight_map = read_index(index)
    files = [folder / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.exists():
            of = f"the index names {len(files)} shards"
            raise BrokenCheckpoint(Fault.MISSING_SHARD, file, f"the file is missing; {of}")
    tensors = _merge(read_header(file) for file in files)
    _check_index(tensors, weight_map, index)
    strays = _stray_files(folder, {f.name for f in files}, tensors)
    findings = _unlisted(tensors, weight_map) + strays
    return Shards(folder, tuple(files), tensors, tuple(findings))


def _single(folder: Path) -> Shards:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BrokenCheckpoint(Fault.NO_WEIGHTS, folder, "no *.safetensors file is here")
    if len(files) > 1:
        what = f"{len(files)} *.safetensors files and no {INDEX}"
        raise BrokenCheckpoint(Fault.NO_INDEX, folder, what)
    return Shards(folder, tuple(files), read_header(files[0]).tensors, ())


def read_shards(folder: Path) -> Shards:
    """Reads and checks the headers of all weight files of a folder.

    Raises:
        BrokenCheckpoint: a fault of a file, of the index or of the folder.
    """
    index = folder / INDEX
    return _indexed(folder, index) if index.exists() else _single(folder)
