"""All tensors of a DeepSeek-V4 checkpoint, draft layers (MTP) left out.

Linears are FP8 E4M3 with one E8M0 scale per block of rows and columns; hyper-connections, router
corrections and sinks are fp32. Shape letters follow the config: H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from moet.checkpoint.synth.draw import constant, scale_byte
from moet.checkpoint.synth.moe import EXPERT_GAIN, Moe, norm
from moet.checkpoint.writer import TensorPlan

_E4M3_MAX = 448
_PEAK = 4.5  # largest of a block's Gaussian values, in standard deviations


class _Writer:
    """The plans of one model; ``config`` is the text part."""

    def __init__(self, config: dict[str, Any], moe: Moe, block: tuple[int, int]) -> None:
        self.c = config
        self.moe = moe
        self.draw = moe.draw
        self.block = block
        self.hidden: int = config["hidden_size"]
        self.hc: int = config["hc_mult"]

    def model(self) -> Iterator[TensorPlan]:
        """Everything, in layer order."""
        vocab, hc_width = self.c["vocab_size"], self.hc * self.hidden
        yield self.draw.gaussian("embed.weight", (vocab, self.hidden), 1.0)
        for layer in range(self.c["num_hidden_layers"]):
            yield from self.attention(layer, f"layers.{layer}.attn.")
            yield from self.ffn(layer, f"layers.{layer}.ffn.")
            yield from self.around(f"layers.{layer}.")
        yield norm("norm.weight", self.hidden)
        yield self.bf16("head.weight", (vocab, self.hidden))
        yield self.draw.gaussian("hc_head_fn", (self.hc, hc_width), hc_width**-0.5, "F32")
        yield self.draw.gaussian("hc_head_base", (self.hc,), 0.1, "F32")
        yield constant("hc_head_scale", (1,), 1.0, "F32")

    def bf16(self, name: str, shape: tuple[int, int]) -> TensorPlan:
        """A plain linear."""
        return self.draw.gaussian(name, shape, shape[1] ** -0.5)

    def fp8(self, name: str, rows: int, k: int, gain: float = 1.0) -> Iterator[TensorPlan]:
        """A linear in blocks; all blocks of a Gaussian matrix get the same power of two."""
        std = gain * k**-0.5
        exponent = math.ceil(math.log2(_PEAK * std / _E4M3_MAX))
        yield self.draw.gaussian(f"{name}.weight", (rows, k), std * 2.0**-exponent, "F8_E4M3")
        grid = (-(-rows // self.block[0]), -(-k // self.block[1]))
        yield scale_byte(f"{name}.scale", grid, 127 + exponent)

    def around(self, p: str) -> Iterator[TensorPlan]:
        """Norms and hyper-connections of one layer."""
        width, mix = self.hc * self.hidden, (2 + self.hc) * self.hc
        for part in ("attn", "ffn"):
            yield norm(f"{p}{part}_norm.weight", self.hidden)
            yield self.draw.gaussian(f"{p}hc_{part}_fn", (mix, width), width**-0.5, "F32")
            yield self.draw.gaussian(f"{p}hc_{part}_base", (mix,), 0.1, "F32")
            yield constant(f"{p}hc_{part}_scale", (3,), 1.0, "F32")

    def attention(self, layer: int, p: str) -> Iterator[TensorPlan]:
        """Shared-KV attention, its compressor and its indexer."""
        c, ratio = self.c, self.c["compress_ratios"][layer]
        heads, head, groups = c["num_attention_heads"], c["head_dim"], c["o_groups"]
        yield from self.fp8(p + "wq_a", c["q_lora_rank"], self.hidden)
        yield from self.fp8(p + "wkv", head, self.hidden)
        yield from self.fp8(p + "wq_b", heads * head, c["q_lora_rank"])
        yield from self.fp8(p + "wo_a", groups * c["o_lora_rank"], heads * head // groups)
        yield from self.fp8(p + "wo_b", self.hidden, groups * c["o_lora_rank"])
        yield norm(p + "q_norm.weight", c["q_lora_rank"])
        yield norm(p + "kv_norm.weight", head)
        yield self.draw.gaussian(p + "attn_sink", (heads,), 1.0, "F32")
        if ratio > 1:
            yield from self.compressor(p + "compressor.", ratio, head)
        if ratio == 4:
            yield from self.indexer(p + "indexer.", ratio)

    def indexer(self, p: str, ratio: int) -> Iterator[TensorPlan]:
        """Picks the compressed positions that a query looks at."""
        heads, head = self.c["index_n_heads"], self.c["index_head_dim"]
        yield from self.fp8(p + "wq_b", heads * head, self.c["q_lora_rank"])
        yield self.bf16(p + "weights_proj.weight", (heads, self.hidden))
        yield from self.compressor(p + "compressor.", ratio, head)

    def compressor(self, p: str, ratio: int, head: int) -> Iterator[TensorPlan]:
        """``ratio`` tokens into one; at ratio 4 the windows overlap, so two sets of weights."""
        rows = head * (2 if ratio == 4 else 1)
        yield self.bf16(p + "wkv.weight", (rows, self.hidden))
        yield self.bf16(p + "wgate.weight", (rows, self.hidden))
        yield self.draw.gaussian(p + "ape", (ratio, rows), 0.1, "F32")
        yield norm(p + "norm.weight", head)

    def ffn(self, layer: int, p: str) -> Iterator[TensorPlan]:
        """Router, shared expert, routed experts."""
        moe, geometry = self.moe, self.moe.geometry
        yield moe.router(p + "gate.weight", layer)
        if layer < self.c["num_hash_layers"]:
            yield moe.token_table(p + "gate.tid2eid", layer, self.c["vocab_size"])
        else:
            yield constant(p + "gate.bias", (geometry.experts,), 0.0, "F32")
        inter = geometry.intermediate * self.c["n_shared_experts"]
        for m, rows, k in (
            ("w1", inter, self.hidden),
            ("w3", inter, self.hidden),
            ("w2", self.hidden, inter),
        ):
            yield from self.fp8(f"{p}shared_experts.{m}", rows, k, EXPERT_GAIN)
        yield from moe.experts(layer)


def plans(config: dict[str, Any], moe: Moe) -> Iterator[TensorPlan]:
    """The tensors, in layer order. Names: DeepSeek's own, which vLLM maps."""
    block = config["quantization_config"]["weight_block_size"]
    return _Writer(config, moe, (block[0], block[1])).model()
