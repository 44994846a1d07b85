"""One checkpoint folder, opened: config, geometry, shards and experts agree, or it is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moet.base.report import Finding
from moet.checkpoint.experts import ExpertIndex, ExpertTensors
from moet.checkpoint.families import ExpertFormat
from moet.checkpoint.faults import BrokenCheckpoint, Fault
from moet.checkpoint.geometry import CONFIG, ModelGeometry, read_config, read_geometry
from moet.checkpoint.header import TensorInfo
from moet.checkpoint.shards import Shards, read_shards
from moet.formats.mxfp4 import BLOCK


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers, index and config were checked against each other.

    Attributes:
        folder: where it is.
        config: config.json as it was read.
        geometry: the routed experts.
        shards: every tensor's place.
        experts: finds the tensors of routed experts.
    """

    folder: Path
    config: dict[str, Any]
    geometry: ModelGeometry
    shards: Shards
    experts: ExpertIndex

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor, by name."""
        return self.shards.tensors

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is odd about the files but harmless."""
        return self.shards.findings

    def expert_tensors(self, layer: int, expert: int) -> ExpertTensors:
        """Where the bytes of a routed expert are."""
        return self.experts.find(layer, expert)

    def is_routed_expert(self, name: str) -> bool:
        """Whether a tensor is part of a routed expert (those of draft layers are not)."""
        return self.experts.is_expert(name)

    def routed_expert_names(self) -> frozenset[str]:
        """Names of all tensors of routed experts."""
        return frozenset(self.experts.names())

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts in the files."""
        return sum(self.tensors[name].nbytes for name in self.experts.names())


def _refuse_unsupported(geometry: ModelGeometry, file: Path) -> None:
    if geometry.expert_format is not ExpertFormat.MXFP4:
        what = f"its experts are {geometry.expert_format}: not in this release"
        raise BrokenCheckpoint(Fault.UNSUPPORTED_EXPERTS, file, what)
    refuse_ragged(geometry, file)
    _ = geometry.gate


def refuse_ragged(geometry: ModelGeometry, file: Path) -> None:
    """Raises BrokenCheckpoint, UNSUPPORTED_EXPERTS, for experts that are not whole blocks wide."""
    for name in ("hidden", "intermediate"):
        if (size := getattr(geometry, name)) % BLOCK:
            what = f"{name} size {size} is not a multiple of {BLOCK}"
            hint = f"MXFP4 has blocks of {BLOCK}: experts of this width cannot be in it"
            raise BrokenCheckpoint(Fault.UNSUPPORTED_EXPERTS, file, what, hint=hint)


def refuse_gguf(path: Path) -> None:
    """Says so where a path is a GGUF file, or a folder with such files and no safetensors.

    Raises:
        BrokenCheckpoint: GGUF.
    """
    files = [path] if path.is_file() else list(path.glob("*"))
    names = {file.suffix.lower() for file in files}
    if ".gguf" in names and ".safetensors" not in names:
        raise BrokenCheckpoint(Fault.GGUF, path, "GGUF is not supported")


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Opens a checkpoint folder. Reads headers, index and config only.

    Raises:
        BrokenCheckpoint: anything that is wrong, by name, with a hint.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise BrokenCheckpoint(Fault.UNREADABLE, folder, "not a folder")
    refuse_gguf(folder)
    config = read_config(folder)
    geometry = read_geometry(config, folder / CONFIG)
    _refuse_unsupported(geometry, folder / CONFIG)
    shards = read_shards(folder)
    experts = ExpertIndex(geometry, shards.tensors, folder)
    return Checkpoint(folder, config, geometry, shards, experts)
