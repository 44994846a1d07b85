"""Read an exported folder back into the plain model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from training.export import PROJECTIONS
from training.geometry import Geometry, from_hf_config
from training.mxfp4 import decode


def read_config(folder: Path) -> dict[str, Any]:
    """config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of every shard the index names."""
    index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))
    out: dict[str, Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        out.update(load_file(str(folder / name)))
    return out


def projection(tensors: dict[str, Tensor], stem: str) -> Tensor:
    """One expert matrix [out, in] fp32, from MXFP4 or plain storage."""
    if f"{stem}.weight" in tensors:
        return tensors[f"{stem}.weight"].float()
    return decode(tensors[f"{stem}.weight_packed"], tensors[f"{stem}.weight_scale"])


def stack_experts(tensors: dict[str, Tensor], g: Geometry) -> dict[str, Tensor]:
    """model.layers.N.mlp.experts.P -> [E, out, in] fp32."""
    out: dict[str, Tensor] = {}
    for layer in range(g.layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        for name in PROJECTIONS:
            every = [projection(tensors, f"{prefix}{e}.{name}") for e in range(g.experts)]
            out[prefix + name] = torch.stack(every)
    return out


def load(folder: Path) -> tuple[dict[str, Tensor], Geometry]:
    """The training state (fp32, experts stacked) of an exported folder, and its geometry."""
    g = from_hf_config(read_config(folder))
    tensors = read_tensors(folder)
    plain = {name: t.float() for name, t in tensors.items() if ".experts." not in name}
    return plain | stack_experts(tensors, g), g
