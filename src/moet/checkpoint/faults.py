"""Every way in which a checkpoint can be wrong, by name, with what a user can do about it."""

from __future__ import annotations

import stat
from enum import StrEnum
from pathlib import Path

from moet.base.errors import CheckpointError


class Fault(StrEnum):
    """One way to be wrong. The value is stable: scripts may match on it."""

    # one safetensors file
    UNREADABLE = "unreadable"
    TOO_SHORT = "too-short"
    LFS_POINTER = "lfs-pointer"
    HEADER_TOO_LONG = "header-too-long"
    HEADER_PAST_END = "header-past-end"
    NOT_AN_OBJECT = "not-an-object"
    NOT_UTF8 = "not-utf8"
    NOT_JSON = "not-json"
    DUPLICATE_KEY = "duplicate-key"
    BAD_METADATA = "bad-metadata"
    BAD_ENTRY = "bad-entry"
    UNKNOWN_DTYPE = "unknown-dtype"
    BAD_SHAPE = "bad-shape"
    BAD_OFFSETS = "bad-offsets"
    SIZE_MISMATCH = "size-mismatch"
    OVERLAP = "overlap"
    HOLE = "hole"
    TRUNCATED = "truncated"
    TRAILING_BYTES = "trailing-bytes"
    # the folder and its index
    GGUF = "gguf"
    NO_WEIGHTS = "no-weights"
    NO_INDEX = "no-index"
    BAD_INDEX = "bad-index"
    BAD_SHARD_NAME = "bad-shard-name"
    MISSING_SHARD = "missing-shard"
    MISSING_TENSOR = "missing-tensor"
    DUPLICATE_TENSOR = "duplicate-tensor"
    # the model
    BAD_CONFIG = "bad-config"
    UNKNOWN_ARCHITECTURE = "unknown-architecture"
    NO_EXPERTS = "no-experts"
    UNSUPPORTED_EXPERTS = "unsupported-experts"
    MISSING_EXPERT = "missing-expert"
    EXTRA_EXPERT = "extra-expert"
    WRONG_SHAPE = "wrong-shape"
    WRONG_DTYPE = "wrong-dtype"
    # writing
    UNKNOWN_PRESET = "unknown-preset"
    NO_SPACE = "no-space"
    NOT_EMPTY = "not-empty"


_DAMAGED = "the file is damaged: download it again and compare its checksum"
_CUT_SHORT = "the download was cut short: resume it, or delete the file and download it again"
_MIXED = (
    "files of two downloads lie in one folder: delete the stale ones, or download into a new one"
)
_CONFIG = "config.json and the weights do not belong together: download both from one revision"

HINTS: dict[Fault, str] = {
    Fault.UNREADABLE: "check that the path exists and that you may read it",
    Fault.TOO_SHORT: _CUT_SHORT,
    Fault.LFS_POINTER: "run `git lfs pull` in the folder, or download with the hub's own client",
    Fault.HEADER_PAST_END: _CUT_SHORT,
    Fault.TRUNCATED: _CUT_SHORT,
    Fault.GGUF: "download the model as a safetensors checkpoint with MXFP4 experts",
    Fault.NO_WEIGHTS: "give the folder that holds config.json and the *.safetensors files",
    Fault.NO_INDEX: "download model.safetensors.index.json too: it says which shards there are",
    Fault.BAD_INDEX: "download model.safetensors.index.json again",
    Fault.BAD_SHARD_NAME: "shards lie beside the index: download the index again",
    Fault.MISSING_SHARD: "the download is not complete: download the missing shard",
    Fault.MISSING_TENSOR: _MIXED,
    Fault.DUPLICATE_TENSOR: _MIXED,
    Fault.BAD_CONFIG: "repair config.json, or download it again",
    Fault.UNKNOWN_ARCHITECTURE: "serve it with vLLM alone, or ask for the architecture",
    Fault.NO_EXPERTS: "a dense model gains nothing here: serve it with vLLM alone",
    Fault.UNSUPPORTED_EXPERTS: "use a checkpoint of this model with MXFP4 experts",
    Fault.MISSING_EXPERT: _CONFIG,
    Fault.EXTRA_EXPERT: _CONFIG,
    Fault.WRONG_SHAPE: _CONFIG,
    Fault.WRONG_DTYPE: _CONFIG,
    Fault.UNKNOWN_PRESET: "name a preset, or give the path of a config.json",
    Fault.NO_SPACE: "free some space, or cut the model: fewer --layers or --experts",
    Fault.NOT_EMPTY: "give a new or an empty folder",
}


class BrokenCheckpoint(CheckpointError):  # noqa: N818 - reads better in a raise than ...Error
    """A checkpoint that cannot be used, or written.

    Args:
        fault: which way to be wrong.
        where: the file or the folder.
        what: the fact, with names and numbers.
        hint: instead of the fault's own hint.
    """

    def __init__(self, fault: Fault, where: Path | str, what: str, *, hint: str = "") -> None:
        super().__init__(f"{where}: {what} [{fault}]", hint=hint or HINTS.get(fault, _DAMAGED))
        self.fault = fault
        self.where = Path(where)


def require_regular(file: Path) -> None:
    """A reader of a pipe or a device would wait for ever, or never end.

    Raises:
        BrokenCheckpoint: UNREADABLE: it is something other than a file.
        OSError: it is not there.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise BrokenCheckpoint(Fault.UNREADABLE, file, "cannot be read: not a regular file")
