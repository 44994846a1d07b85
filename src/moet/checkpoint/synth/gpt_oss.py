"""All tensors of a gpt-oss checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moet.checkpoint.synth.draw import constant
from moet.checkpoint.synth.moe import Moe, norm
from moet.checkpoint.writer import TensorPlan


def plans(config: dict[str, Any], moe: Moe) -> Iterator[TensorPlan]:
    """The tensors, in layer order. Names: transformers' GptOssForCausalLM."""
    draw, vocab, hidden = moe.draw, config["vocab_size"], config["hidden_size"]
    yield draw.gaussian("model.embed_tokens.weight", (vocab, hidden), 1.0)
    for layer in range(config["num_hidden_layers"]):
        yield from _attention(config, moe, layer)
        p = f"model.layers.{layer}.mlp."
        yield moe.router(p + "router.weight", layer)
        yield constant(p + "router.bias", (moe.geometry.experts,), 0.0)
        yield from moe.experts(layer)
    yield norm("model.norm.weight", hidden)
    yield draw.gaussian("lm_head.weight", (vocab, hidden), hidden**-0.5)


def _attention(config: dict[str, Any], moe: Moe, layer: int) -> Iterator[TensorPlan]:
    hidden, head, heads = config["hidden_size"], config["head_dim"], config["num_attention_heads"]
    queries, keys = heads * head, config["num_key_value_heads"] * head
    shapes = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden)}
    p = f"model.layers.{layer}."
    yield norm(p + "input_layernorm.weight", hidden)
    for name, shape in (shapes | {"o": (hidden, queries)}).items():
        yield moe.draw.gaussian(f"{p}self_attn.{name}_proj.weight", shape, shape[1] ** -0.5)
        yield moe.draw.gaussian(f"{p}self_attn.{name}_proj.bias", shape[:1], 0.02)
    yield moe.draw.gaussian(p + "self_attn.sinks", (heads,), 1.0)
    yield norm(p + "post_attention_layernorm.weight", hidden)
