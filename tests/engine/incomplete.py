"""A copy of a checkpoint that lacks a tensor, in its shard and in its index alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def write(source: Path, target: Path, name: str) -> None:
    """Copies ``source`` to ``target`` without the tensor ``name``."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    shutil.copytree(source, target)
    path = target / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = target / index["weight_map"].pop(name)
    path.write_text(json.dumps(index))
    with safe_open(shard, framework="pt") as tensors:
        kept = {key: tensors.get_tensor(key) for key in tensors.keys() if key != name}  # noqa: SIM118
    save_file(kept, shard, metadata={"format": "pt"})
