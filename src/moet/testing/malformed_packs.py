"""Packs that are wrong, each in one way that has a name.

``PACKS`` holds functions that spoil the folder of a good pack; together they cover every
``PackFault`` that opening can meet without looking at the checkpoint. ``CHECKPOINTS`` spoil the
checkpoint of a good pack instead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moet.checkpoint.geometry import CONFIG
from moet.pack.faults import PackFault
from moet.pack.journal import JOURNAL
from moet.pack.spec import MANIFEST, MOST_BYTES, sign

Spoil = Callable[[Path], None]


def edit(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """Changes the manifest's content and signs it again."""

    def spoil(folder: Path) -> None:
        content = json.loads((folder / MANIFEST).read_bytes())
        del content["checksum"]
        change(content)
        (folder / MANIFEST).write_bytes(sign(content))

    return spoil


def edit_text(change: Callable[[str], str]) -> Spoil:
    """Changes the text of the signed part of a manifest and signs it again."""

    def spoil(folder: Path) -> None:
        content = json.loads((folder / MANIFEST).read_bytes())
        del content["checksum"]
        signed = sign(content)
        text = change(signed[len('{"checksum":"') + 16 :].decode())
        (folder / MANIFEST).write_bytes(_signed(text.encode("utf-8", "surrogateescape")))

    return spoil


def _signed(rest: bytes) -> bytes:
    from xxhash import xxh3_64_hexdigest

    return b'{"checksum":"' + xxh3_64_hexdigest(rest).encode() + rest


def _set(*path: Any, to: Any) -> Spoil:
    """Sets one field, named by the keys and indices that lead to it."""

    def change(content: Any) -> None:
        *way, last = path
        for step in way:
            content = content[step]
        content[last] = to

    return edit(change)


def _drop(*path: Any) -> Spoil:
    def change(content: Any) -> None:
        *way, last = path
        for step in way:
            content = content[step]
        del content[last]

    return edit(change)


def _raw(content: bytes) -> Spoil:
    return lambda folder: _write(folder / MANIFEST, content)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _cut(name: str, nbytes: int) -> Spoil:
    def spoil(folder: Path) -> None:
        size = (folder / name).stat().st_size
        os.truncate(folder / name, size + nbytes)

    return spoil


def _flip(folder: Path) -> None:
    raw = bytearray((folder / MANIFEST).read_bytes())
    raw[len(raw) // 2] ^= 1
    (folder / MANIFEST).write_bytes(raw)


def _unfinished(folder: Path) -> None:
    (folder / MANIFEST).rename(folder / JOURNAL)


def _huge(folder: Path) -> None:
    os.truncate(folder / MANIFEST, MOST_BYTES + 1)


def _folder_as_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()


def _pipe_as_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)


def _swap_files(content: dict[str, Any]) -> None:
    content["files"][0]["name"], content["files"][1]["name"] = "experts-1.bin", "experts-0.bin"


def _reverse_layers(content: dict[str, Any]) -> None:
    content["model"]["moe_layers"].reverse()


def _repeat_key(text: str) -> str:
    return text.replace('"tiles":1', '"tiles":1,"tiles":1')


_F = PackFault

# name: (what it must be called, what spoils the folder of a good pack with two data files)
PACKS: dict[str, tuple[PackFault, Spoil]] = {
    "no manifest": (_F.NO_PACK, lambda f: (f / MANIFEST).unlink()),
    "only a journal": (_F.UNFINISHED, _unfinished),
    "manifest is a folder": (_F.UNREADABLE, _folder_as_manifest),
    "manifest is a pipe": (_F.UNREADABLE, _pipe_as_manifest),
    "manifest without end": (_F.TOO_LARGE, _huge),
    "manifest is empty": (_F.DAMAGED_MANIFEST, _raw(b"")),
    "manifest is cut": (_F.DAMAGED_MANIFEST, _cut(MANIFEST, -1)),
    "manifest has a byte more": (_F.DAMAGED_MANIFEST, _cut(MANIFEST, 1)),
    "a flipped bit": (_F.DAMAGED_MANIFEST, _flip),
    "signed nonsense": (_F.NOT_JSON, edit_text(lambda text: text + "}")),
    "signed latin-1": (_F.NOT_JSON, edit_text(lambda t: t.replace('"moet":"', '"moet":"\udce9'))),
    "a field twice": (_F.NOT_JSON, edit_text(_repeat_key)),
    "NaN": (_F.NOT_JSON, edit_text(lambda t: t.replace('"tiles":1', '"tiles":NaN'))),
    "deep nesting": (_F.NOT_JSON, edit_text(lambda t: t.replace(":1,", ":" + "[" * 200_000, 1))),
    "format of tomorrow": (_F.UNKNOWN_FORMAT, _set("format", to="moet-pack-2")),
    "format is missing": (_F.BAD_FIELD, _drop("format")),
    "format is a number": (_F.BAD_FIELD, _set("format", to=1)),
    "tiles of tomorrow": (_F.UNKNOWN_TILES, _set("tiles", to=2)),
    "tiles are true": (_F.BAD_FIELD, _set("tiles", to=True)),
    "a field too many": (_F.BAD_FIELD, _set("comment", to="")),
    "moet is missing": (_F.BAD_FIELD, _drop("moet")),
    "source holds a zero": (_F.BAD_FIELD, _set("source", to="/a\0b")),
    "model is a list": (_F.BAD_FIELD, _set("model", to=[])),
    "model with more": (_F.BAD_FIELD, _set("model", "top_k", to=2)),
    "model with less": (_F.BAD_FIELD, _drop("model", "biased")),
    "biased is a number": (_F.BAD_FIELD, _set("model", "biased", to=0)),
    "hidden is a fraction": (_F.BAD_FIELD, _set("model", "hidden", to=64.0)),
    "hidden is negative": (_F.BAD_FIELD, _set("model", "hidden", to=-64)),
    "experts without end": (_F.BAD_FIELD, _set("model", "experts", to=10**12)),
    "no experts": (_F.BAD_FIELD, _set("model", "experts", to=0)),
    "no layers": (_F.BAD_FIELD, _set("model", "moe_layers", to=[])),
    "layers backwards": (_F.BAD_FIELD, edit(_reverse_layers)),
    "a layer twice": (_F.BAD_FIELD, _set("model", "moe_layers", to=[0, 0])),
    "a layer is text": (_F.BAD_FIELD, _set("model", "moe_layers", to=["0", "1"])),
    "half a block": (_F.BAD_GEOMETRY, _set("model", "hidden", to=48)),
    "wider than its records": (_F.BAD_GEOMETRY, _set("model", "hidden", to=4096)),
    "records of another size": (_F.BAD_GEOMETRY, _set("record_bytes", to=4096)),
    "record_bytes is text": (_F.BAD_FIELD, _set("record_bytes", to="4096")),
    "checkpoint without files": (_F.BAD_FIELD, _set("checkpoint", to=[])),
    "checkpoint file is text": (_F.BAD_FIELD, _set("checkpoint", 0, to="model.safetensors")),
    "checkpoint file with less": (_F.BAD_FIELD, _drop("checkpoint", 0, "content")),
    "header hash is a number": (_F.BAD_FIELD, _set("checkpoint", 0, "header", to=7)),
    "header hash in capitals": (_F.BAD_FIELD, _set("checkpoint", 0, "header", to="A" * 16)),
    "content hash is short": (_F.BAD_FIELD, _set("checkpoint", 0, "content", to="a")),
    "time is text": (_F.BAD_FIELD, _set("checkpoint", 0, "mtime_ns", to="0")),
    "time of 64 bits": (_F.BAD_FIELD, _set("checkpoint", 0, "mtime_ns", to=2**63)),
    "no files": (_F.BAD_FIELD, _set("files", to=[])),
    "files in another order": (_F.BAD_FIELD, edit(_swap_files)),
    "file name with a path": (_F.BAD_FIELD, _set("files", 0, "name", to="../experts-0.bin")),
    "first file elsewhere": (_F.BAD_FIELD, _set("files", 0, "folder", to="/tmp")),
    "second file beside": (_F.BAD_FIELD, _set("files", 1, "folder", to="")),
    "second folder is relative": (_F.BAD_FIELD, _set("files", 1, "folder", to="../b")),
    "file with more": (_F.BAD_FIELD, _set("files", 0, "bytes", to=1)),
    "no checksums": (_F.BAD_FIELD, _set("checksums", to={})),
    "checksums are a list": (_F.BAD_FIELD, _set("checksums", to=[])),
    "checksums of a layer more": (_F.BAD_FIELD, _set("checksums", "7", to=[])),
    "a checksum less": (_F.BAD_FIELD, _drop("checksums", "0", 0)),
    "a checksum is null": (_F.BAD_FIELD, _set("checksums", "0", 0, to=None)),
    "a checksum with a sign": (_F.BAD_FIELD, _set("checksums", "0", 0, to="-" + "0" * 15)),
    "data file is missing": (_F.MISSING_FILE, lambda f: (f / "experts-0.bin").unlink()),
    "data file on a disk that is away": (
        _F.MISSING_FILE,
        _set("files", 1, "folder", to="/nonexistent/x.moetpack"),
    ),
    "data file is cut": (_F.WRONG_SIZE, _cut("experts-0.bin", -1)),
    "data file has a byte more": (_F.WRONG_SIZE, _cut("experts-0.bin", 1)),
    "data file of fewer records": (_F.WRONG_SIZE, _cut("experts-0.bin", -4096)),
    "one data file less": (_F.WRONG_SIZE, _drop("files", 1)),
}


def _touch(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    state = file.stat()
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 1))


def _rename_tensor(folder: Path) -> None:
    """A header of the same length, size and time, with another name in it."""
    file = sorted(folder.glob("*.safetensors"))[0]
    state, raw = file.stat(), file.read_bytes()
    file.write_bytes(raw.replace(b'"format":"pt"', b'"format":"tf"', 1))
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


def _rename_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.rename(folder / "weights.safetensors")


def _narrower_config(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    config["model_type"] = "glm4_moe"
    config["n_routed_experts"] = config["num_experts"]
    (folder / CONFIG).write_text(json.dumps(config))


# name: (what the pack must be called, what changes its checkpoint: qwen3_moe, one file)
CHECKPOINTS: dict[str, tuple[PackFault, Spoil]] = {
    "written again": (_F.STALE, _touch),
    "another header of the same size": (_F.STALE, _rename_tensor),
    "a file of another name": (_F.STALE, _rename_file),
    "a config of another architecture": (_F.OTHER_MODEL, _narrower_config),
}
