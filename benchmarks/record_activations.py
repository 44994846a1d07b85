"""Records what a model's experts really see: the input of `benchmarks/error_tables.py`.

    python benchmarks/record_activations.py OUT.npz [--model FOLDER] [--texts N] [--tokens N]

Stock transformers reads held-out dialogues of the demo, question and answer, on the checkpoint with
its MXFP4 experts written out as BF16 (value for value). For each layer, of tokens drawn at random
from every dialogue: `layerN.x`, the input of the experts as the model has it (bf16 bits as uint16,
[tokens, hidden]), and `layerN.h`, the middle of every expert that a token is routed to, in fp32
([tokens x top-k, intermediate]).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
SEED = 20261201

Arrays = dict[str, NDArray[Any]]


def bf16_bits(x: Tensor) -> NDArray[np.uint16]:
    """The bits of a bf16 tensor."""
    return x.contiguous().view(torch.uint16).numpy()


def middles(experts: nn.Module, x: Tensor, ids: Tensor) -> NDArray[np.float32]:
    """silu(g) * u of the experts `ids` [T, K] on `x` [T, H], in fp32: [T x K, I].

    One row a routing, tokens outermost; the matrices are the module's gate and up, stacked.
    """
    rows = torch.empty(ids.numel(), experts.gate_up_proj.shape[1] // 2)
    for e in ids.unique().tolist():
        token, slot = torch.where(ids == e)
        gate, up = (x[token].float() @ experts.gate_up_proj[e].float().T).chunk(2, dim=-1)
        rows[token * ids.shape[1] + slot] = nn.functional.silu(gate) * up
    return rows.numpy()


class Recorder:
    """Takes what passes into the experts of a transformers model.

    Args:
        model: of transformers, with `model.layers[n].mlp.experts`.
        tokens: how many to take of a text, at most.
        seed: which ones.
    """

    def __init__(self, model: nn.Module, tokens: int, seed: int = SEED) -> None:
        self.model, self.tokens = model, tokens
        self._random = np.random.default_rng(seed)
        self._parts: defaultdict[str, list[NDArray[Any]]] = defaultdict(list)

    def read(self, ids: Tensor) -> None:
        """Runs a text [1, T] through the model and takes some of its tokens."""
        length = ids.shape[1]
        chosen = self._random.choice(length, min(self.tokens, length), replace=False)
        with torch.inference_mode(), self._listening(torch.from_numpy(np.sort(chosen))):
            self.model(ids)

    @contextmanager
    def _listening(self, chosen: Tensor) -> Iterator[None]:
        layers = {n: layer.mlp for n, layer in enumerate(self.model.model.layers)}
        hooks = [
            mlp.experts.register_forward_pre_hook(self._hook(n, chosen))
            for n, mlp in layers.items()
            if hasattr(mlp, "experts")
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, layer: int, chosen: Tensor) -> Any:
        def take(experts: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            hidden, ids = inputs[0], inputs[1]
            x = hidden.reshape(-1, hidden.shape[-1])[chosen]
            self._parts[f"layer{layer}.x"].append(bf16_bits(x))
            self._parts[f"layer{layer}.h"].append(middles(experts, x, ids[chosen]))

        return take

    def arrays(self) -> Arrays:
        """All that was taken."""
        return {name: np.concatenate(parts) for name, parts in self._parts.items()}


def texts(model: Path, each: int) -> Iterator[Tensor]:
    """Held-out dialogues of every kind, tokenised, [1, T]."""
    from transformers import AutoTokenizer

    from moet.demo import tasks

    tokenizer = AutoTokenizer.from_pretrained(model)
    for kind in tasks.KINDS:
        for sample in tasks.heldout(kind, each, seed=SEED):
            dialogue = [*sample.messages, {"role": "assistant", "content": sample.answer}]
            yield tokenizer.apply_chat_template(
                dialogue, tools=list(sample.tools) or None, return_tensors="pt", return_dict=False
            )


def record(model: Path, each: int, tokens: int) -> Arrays:
    """The activations of a checkpoint with MXFP4 experts."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as plain:
        command = [sys.executable, "-m", "training.dequantize", str(model), plain]
        subprocess.run(command, check=True, cwd=ROOT)
        stock = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16).eval()
    recorder = Recorder(stock, tokens)
    for ids in texts(model, each):
        recorder.read(ids)
    return recorder.arrays()


def main(arguments: list[str] | None = None) -> None:
    """Records, and says what."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("out", type=Path, metavar="OUT.npz")
    parser.add_argument("--model", type=Path, help="default: the demo checkpoint")
    parser.add_argument("--texts", type=int, default=8, help="of each kind")
    parser.add_argument("--tokens", type=int, default=64, help="of each text, at most")
    asked = parser.parse_args(arguments)
    from moet import demo

    arrays = record(asked.model or demo.path(), asked.texts, asked.tokens)
    np.savez(asked.out, **arrays)
    for name, array in arrays.items():
        print(f"{name}: {' x '.join(map(str, array.shape))} {array.dtype}")


if __name__ == "__main__":
    main()
