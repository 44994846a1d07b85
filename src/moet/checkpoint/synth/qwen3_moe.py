"""All tensors of a qwen3_moe checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moet.checkpoint.synth.moe import Moe, norm
from moet.checkpoint.writer import TensorPlan


def plans(config: dict[str, Any], moe: Moe) -> Iterator[TensorPlan]:
    """The tensors, in layer order. Names: transformers' Qwen3MoeForCausalLM."""
    draw, vocab, hidden = moe.draw, config["vocab_size"], config["hidden_size"]
    yield draw.gaussian("model.embed_tokens.weight", (vocab, hidden), 1.0)
    for layer in range(config["num_hidden_layers"]):
        yield from _attention(config, moe, layer)
        p = f"model.layers.{layer}."
        if layer in moe.geometry.moe_layers:
            yield moe.router(p + "mlp.gate.weight", layer)
            yield from moe.experts(layer)
        else:
            yield from _dense(config, moe, p + "mlp.")
    yield norm("model.norm.weight", hidden)
    if not config.get("tie_word_embeddings"):
        yield draw.gaussian("lm_head.weight", (vocab, hidden), hidden**-0.5)


def _attention(config: dict[str, Any], moe: Moe, layer: int) -> Iterator[TensorPlan]:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    p = f"model.layers.{layer}."
    yield norm(p + "input_layernorm.weight", hidden)
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield moe.draw.gaussian(f"{p}self_attn.{name}_proj.weight", (rows, hidden), hidden**-0.5)
    yield moe.draw.gaussian(p + "self_attn.o_proj.weight", (hidden, queries), queries**-0.5)
    yield norm(p + "self_attn.q_norm.weight", head)
    yield norm(p + "self_attn.k_norm.weight", head)
    yield norm(p + "post_attention_layernorm.weight", hidden)


def _dense(config: dict[str, Any], moe: Moe, p: str) -> Iterator[TensorPlan]:
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    for name, shape in (
        ("gate", (inter, hidden)),
        ("up", (inter, hidden)),
        ("down", (hidden, inter)),
    ):
        yield moe.draw.gaussian(f"{p}{name}_proj.weight", shape, shape[1] ** -0.5)
