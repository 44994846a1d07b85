"""What a run leaves in its folder: the export as one archive, and masters to resume from."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.dequantize import TOKENIZER
from training.export import export
from training.model import TinyMoe

NAME = "moet-tiny"
HALVES = 2


def save_export(model: TinyMoe, tokenizer: Path, out: Path) -> Path:
    """The MXFP4 folder beside its tar archive."""
    folder = out.parent / (out.name + "-export") / NAME
    folder.mkdir(parents=True, exist_ok=True)
    export(dict(model.named_parameters()), model.g, folder, eos=2, pad=0, quantized=True)
    for name in TOKENIZER:
        shutil.copyfile(tokenizer / name, folder / name)
    with tarfile.open(out / f"{NAME}.tar", "w") as archive:
        archive.add(folder, NAME)
    return folder


def save_masters(model: TinyMoe, out: Path) -> None:
    """The unrounded weights, bf16, in two files."""
    named = [(n, p.detach().bfloat16().cpu()) for n, p in model.named_parameters()]
    for i in range(HALVES):
        save_file(dict(named[i::HALVES]), str(out / f"masters-{i}.safetensors"))


def load_masters(folder: Path) -> dict[str, Tensor]:
    """What save_masters wrote, fp32."""
    out: dict[str, Tensor] = {}
    for i in range(HALVES):
        out.update(load_file(str(folder / f"masters-{i}.safetensors")))
    return {name: t.to(torch.float32) for name, t in out.items()}
