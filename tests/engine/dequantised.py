"""A qwen3_moe checkpoint with its MXFP4 experts dequantised to bf16: what stock vLLM can serve."""

from __future__ import annotations

import json
from pathlib import Path

from moet.checkpoint import open_checkpoint
from moet.formats import mxfp4


def write(quantised: Path, out: Path) -> None:
    """Every dequantised weight is a small integer times a power of two: exact in bf16."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    checkpoint = open_checkpoint(quantised)
    tensors: dict[str, torch.Tensor] = {}
    for file in quantised.glob("*.safetensors"):
        with safe_open(file, framework="pt") as source:
            for name in source.keys():  # noqa: SIM118
                tensors[name] = source.get_tensor(name)
    for name in checkpoint.routed_expert_names():
        if name.endswith("weight_packed"):
            codes = tensors.pop(name).numpy()
            scales = tensors.pop(name.replace("weight_packed", "weight_scale")).numpy()
            weights = torch.from_numpy(mxfp4.dequantise(codes, scales)).bfloat16()
            tensors[name.replace("weight_packed", "weight")] = weights
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    (out / "config.json").write_text(json.dumps(config))
