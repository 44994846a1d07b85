"""The manifest of a pack: what is in it, where, and how it is known to be right.

docs/format.md has it in words. A ``Plan`` is what is known before the first byte is written; the
``Manifest`` adds the records' checksums.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

import moet
from moet.base.errors import MoetError
from moet.checkpoint.geometry import ModelGeometry
from moet.checkpoint.header import strict_json
from moet.checkpoint.keys import ExpertKey
from moet.formats.tiling import TILE_VERSION, ExpertLayout
from moet.pack.faults import BrokenPack, PackFault, unreadable
from moet.pack.fields import Fields
from moet.pack.identity import CheckpointFile

FORMAT: Final = "moet-pack-1"
MANIFEST: Final = "manifest.json"
MOST_BYTES: Final = 64 << 20

_OPENING: Final = b'{"checksum":"'
_DIGITS: Final = 16


@dataclass(frozen=True, kw_only=True)
class PackModel:
    """The routed experts that a pack holds: what of a ``ModelGeometry`` decides its bytes."""

    architecture: str
    hidden: int
    intermediate: int
    biased: bool
    experts: int
    moe_layers: tuple[int, ...]

    @classmethod
    def of(cls, geometry: ModelGeometry) -> PackModel:
        """That of a checkpoint."""
        return cls(
            architecture=geometry.architecture,
            hidden=geometry.hidden,
            intermediate=geometry.intermediate,
            biased=geometry.biased,
            experts=geometry.experts,
            moe_layers=geometry.moe_layers,
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self.__dict__, "moe_layers": list(self.moe_layers)}


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of records.

    Attributes:
        folder: absolute path; empty: beside the manifest.
        name: ``experts-<n>.bin``, n counting from 0 in the order of the files.
    """

    folder: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All of a pack but its records' checksums.

    Attributes:
        model: the experts.
        source: the checkpoint's folder when it was packed; told to people, never compared.
        checkpoint: the identity of its files.
        files: record i lies in ``files[i % len(files)]``.
    """

    model: PackModel
    source: str
    checkpoint: tuple[CheckpointFile, ...]
    files: tuple[DataFile, ...]

    @cached_property
    def layout(self) -> ExpertLayout:
        """Of one record: the whole expert, whatever the tensor-parallel degree.

        Raises:
            FormatError: sizes that are not whole blocks.
        """
        return ExpertLayout(self.model.hidden, self.model.intermediate, self.model.biased)

    @cached_property
    def keys(self) -> tuple[ExpertKey, ...]:
        """The key of record i, layer by layer."""
        model = self.model
        return tuple(ExpertKey(i, e) for i in model.moe_layers for e in range(model.experts))

    @cached_property
    def _layer_rank(self) -> dict[int, int]:
        return {layer: rank for rank, layer in enumerate(self.model.moe_layers)}

    @property
    def records(self) -> int:
        """How many."""
        return len(self.model.moe_layers) * self.model.experts

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return self.records * self.layout.record_bytes

    def index(self, key: ExpertKey) -> int | None:
        """The number of a record; None: there is none."""
        rank = self._layer_rank.get(key[0])
        if rank is None or not 0 <= key[1] < self.model.experts:
            return None
        return rank * self.model.experts + key[1]

    def place(self, index: int) -> tuple[int, int]:
        """(number of the file, offset) of record ``index``."""
        row, file = divmod(index, len(self.files))
        return file, row * self.layout.record_bytes

    def file_bytes(self, file: int) -> int:
        """The size of one data file."""
        return len(range(file, self.records, len(self.files))) * self.layout.record_bytes

    def head(self) -> dict[str, Any]:
        """As JSON; what a resumed run compares with its own."""
        return {
            "format": FORMAT,
            "tiles": TILE_VERSION,
            "model": self.model.as_dict(),
            "record_bytes": self.layout.record_bytes,
            "source": self.source,
            "checkpoint": [_checkpoint_file(file) for file in self.checkpoint],
            "files": [{"folder": file.folder, "name": file.name} for file in self.files],
        }


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A whole manifest.

    Attributes:
        plan: everything but the checksums.
        checksums: xxh3-64 of record i.
        moet: the version that finished the pack; told to people, never compared.
    """

    plan: Plan
    checksums: tuple[int, ...]
    moet: str = moet.__version__

    def to_bytes(self) -> bytes:
        """The file."""
        experts = self.plan.model.experts
        texts = [f"{checksum:016x}" for checksum in self.checksums]
        layers = enumerate(self.plan.model.moe_layers)
        rows = {str(layer): texts[i * experts : (i + 1) * experts] for i, layer in layers}
        return sign(self.plan.head() | {"moet": self.moet, "checksums": rows})


def checksum_of(record: NDArray[np.uint8]) -> int:
    """xxh3-64 of a record's bytes, seed 0."""
    return xxhash.xxh3_64_intdigest(record.data)


def _checkpoint_file(file: CheckpointFile) -> dict[str, Any]:
    return {
        "name": file.name,
        "bytes": file.nbytes,
        "mtime_ns": file.mtime_ns,
        "header": f"{file.header:016x}",
        "content": None if file.content is None else f"{file.content:016x}",
    }


def sign(content: dict[str, Any]) -> bytes:
    """``content`` as the bytes of a manifest: its checksum first, which covers all that follows."""
    rest = b'",' + json.dumps(content, separators=(",", ":")).encode()[1:] + b"\n"
    return _OPENING + xxhash.xxh3_64_hexdigest(rest).encode() + rest


def _check_signature(raw: bytes, path: Path) -> None:
    start = len(_OPENING)
    rest = raw[start + _DIGITS :]
    signed = _OPENING + xxhash.xxh3_64_hexdigest(rest).encode()
    if raw[: start + _DIGITS] != signed:
        what = "its bytes do not match its own checksum"
        raise BrokenPack(PackFault.DAMAGED_MANIFEST, path, what)


def _json(raw: bytes, path: Path) -> Any:
    try:
        return strict_json(raw, path)
    except MoetError as error:
        raise BrokenPack(PackFault.NOT_JSON, path, f"it is no JSON object: {error}") from error


def read_manifest(path: Path) -> tuple[Manifest, int]:
    """A manifest and the checksum that it bears.

    Raises:
        BrokenPack: anything that is wrong, by name.
    """
    raw = read_small(path)
    _check_signature(raw, path)
    return parse_manifest(raw, path), int(raw[len(_OPENING) : len(_OPENING) + _DIGITS], 16)


def read_small(path: Path) -> bytes:
    """The bytes of a manifest or a journal.

    Raises:
        BrokenPack: UNREADABLE or TOO_LARGE.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for, for ever
            raise BrokenPack(PackFault.UNREADABLE, path, "cannot be read: not a regular file")
        with path.open("rb") as stream:
            raw = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(raw) > MOST_BYTES:
        raise BrokenPack(PackFault.TOO_LARGE, path, f"more than {MOST_BYTES} bytes")
    return raw


def parse_manifest(raw: bytes, path: Path) -> Manifest:
    """The content of a manifest, every field checked; its own checksum is not looked at.

    Raises:
        BrokenPack: NOT_JSON, UNKNOWN_FORMAT, UNKNOWN_TILES, BAD_FIELD or BAD_GEOMETRY.
    """
    fields = Fields(_json(raw, path), path)
    plan = _parse_head(fields, path)
    fields.only(*plan.head(), "checksum", "moet", "checksums")
    checksums = _parse_checksums(fields.object("checksums"), plan.model)
    return Manifest(plan=plan, checksums=checksums, moet=fields.text("moet"))


def parse_head(raw: bytes, path: Path) -> Plan:
    """The plan of an unfinished pack. Raises as ``parse_manifest``."""
    fields = Fields(_json(raw, path), path)
    plan = _parse_head(fields, path)
    fields.only(*plan.head())
    return plan


def _parse_head(fields: Fields, path: Path) -> Plan:
    if (found := fields.text("format")) != FORMAT:
        raise BrokenPack(PackFault.UNKNOWN_FORMAT, path, f"its format is {found!r:.40}")
    if (tiles := fields.count("tiles")) != TILE_VERSION:
        what = f"its tiles are of version {tiles}, this moet's of {TILE_VERSION}"
        raise BrokenPack(PackFault.UNKNOWN_TILES, path, what)
    plan = Plan(
        model=_parse_model(fields.object("model")),
        source=fields.text("source"),
        checkpoint=tuple(map(_parse_checkpoint_file, fields.objects("checkpoint"))),
        files=_parse_files(fields.objects("files")),
    )
    _check_geometry(plan, fields.count("record_bytes"), path)
    return plan


def _check_geometry(plan: Plan, record_bytes: int, path: Path) -> None:
    try:
        wanted = plan.layout.record_bytes
    except MoetError as error:
        raise BrokenPack(PackFault.BAD_GEOMETRY, path, str(error)) from error
    if record_bytes != wanted:
        what = f"record_bytes is {record_bytes}; a record of this geometry has {wanted}"
        raise BrokenPack(PackFault.BAD_GEOMETRY, path, what)


def _parse_model(fields: Fields) -> PackModel:
    fields.only(*PackModel.__dataclass_fields__)
    layers = fields.counts("moe_layers")
    if not layers or list(layers) != sorted(set(layers)):
        raise fields.wrong("moe_layers", "not a rising list of layers")
    return PackModel(
        architecture=fields.text("architecture"),
        hidden=fields.size("hidden"),
        intermediate=fields.size("intermediate"),
        biased=fields.flag("biased"),
        experts=fields.size("experts"),
        moe_layers=layers,
    )


def _parse_checkpoint_file(fields: Fields) -> CheckpointFile:
    fields.only("name", "bytes", "mtime_ns", "header", "content")
    return CheckpointFile(
        name=fields.text("name"),
        nbytes=fields.count("bytes"),
        mtime_ns=fields.integer("mtime_ns"),
        header=fields.hash("header"),
        content=fields.hash("content") if fields["content"] is not None else None,
    )


def _parse_files(rows: Sequence[Fields]) -> tuple[DataFile, ...]:
    files = []
    for number, fields in enumerate(rows):
        fields.only("folder", "name")
        folder, name = fields.text("folder"), fields.text("name")
        if name != data_name(number):
            raise fields.wrong("name", f"not {data_name(number)}")
        if bool(folder) != bool(number) or (folder and not Path(folder).is_absolute()):
            raise fields.wrong("folder", "neither beside the manifest nor an absolute path")
        files.append(DataFile(folder, name))
    return tuple(files)


def data_name(number: int) -> str:
    """The name of data file ``number``."""
    return f"experts-{number}.bin"


def _parse_checksums(fields: Fields, model: PackModel) -> tuple[int, ...]:
    fields.only(*map(str, model.moe_layers))
    checksums: list[int] = []
    for layer in model.moe_layers:
        row = fields.hashes(str(layer))
        if len(row) != model.experts:
            raise fields.wrong(str(layer), f"not {model.experts} checksums")
        checksums += row
    return tuple(checksums)
