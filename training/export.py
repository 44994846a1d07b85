"""Write a checkpoint folder: shards, index, config. MXFP4 experts, or everything BF16."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from training.geometry import Geometry, hf_config
from training.mxfp4 import encode, fake_quantize

Named = dict[str, Tensor]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def plain(state: Named, layer: int) -> Iterator[tuple[str, Tensor]]:
    """The bf16 tensors of one layer under their checkpoint names."""
    prefix = f"model.layers.{layer}."
    for name, tensor in state.items():
        if name.startswith(prefix) and ".experts." not in name:
            yield name, tensor.to(torch.bfloat16).contiguous()


def experts(state: Named, layer: int, *, quantized: bool) -> Iterator[tuple[str, Tensor]]:
    """One layer's stacked experts [E, out, in] as per-expert tensors."""
    prefix = f"model.layers.{layer}.mlp.experts."
    for projection in PROJECTIONS:
        stacked = state[prefix + projection].float()
        if quantized:
            codes, scales = encode(stacked)
            parts = {"weight_packed": codes, "weight_scale": scales}
        else:
            parts = {"weight": fake_quantize(stacked).to(torch.bfloat16)}
        for suffix, tensor in parts.items():
            for e, one in enumerate(tensor.unbind(0)):
                yield f"{prefix}{e}.{projection}.{suffix}", one.contiguous()


def shards(state: Named, g: Geometry, count: int, *, quantized: bool) -> list[Named]:
    """Layers dealt to shards in order; the embedding leads the first, the last norm ends it all."""
    out: list[Named] = [{} for _ in range(count)]
    out[0]["model.embed_tokens.weight"] = state["model.embed_tokens.weight"].bfloat16()
    for layer in range(g.layers):
        target = out[layer * count // g.layers]
        target.update(plain(state, layer))
        target.update(experts(state, layer, quantized=quantized))
    out[-1]["model.norm.weight"] = state["model.norm.weight"].bfloat16()
    return out


def write_json(path: Path, value: Any) -> None:
    """Stable, readable JSON with a closing newline."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_weights(folder: Path, parts: list[Named]) -> None:
    """model-0000i-of-0000n.safetensors and the index over them."""
    where: dict[str, str] = {}
    for i, part in enumerate(parts, 1):
        name = f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, str(folder / name), metadata={"format": "pt"})
        where.update(dict.fromkeys(part, name))
    total = sum(t.numel() * t.element_size() for part in parts for t in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def export(
    state: Named, g: Geometry, folder: Path, *, eos: int, pad: int, quantized: bool, count: int = 3
) -> None:
    """Everything but the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu() for name, tensor in state.items()}
    write_weights(folder, shards(state, g, count, quantized=quantized))
    write_json(folder / "config.json", hf_config(g, eos=eos, pad=pad, quantized=quantized))
    generation = {"do_sample": False, "eos_token_id": [eos, pad], "pad_token_id": pad}
    write_json(folder / "generation_config.json", generation)
