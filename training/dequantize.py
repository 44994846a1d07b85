"""MXFP4 -> plain BF16 qwen3_moe, value for value: python -m training.dequantize FROM TO."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from training.export import export
from training.load import load, read_config

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def dequantize(source: Path, target: Path) -> None:
    """A folder that needs no quantisation support. BF16 holds every E2M1 x 2^e exactly."""
    state, g = load(source)
    config = read_config(source)
    eos, pad = config["eos_token_id"], config["pad_token_id"]
    export(state, g, target, eos=eos, pad=pad, quantized=False)
    for name in TOKENIZER:
        shutil.copyfile(source / name, target / name)


if __name__ == "__main__":
    dequantize(Path(sys.argv[1]), Path(sys.argv[2]))
