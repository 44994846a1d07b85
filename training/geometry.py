"""The shape of moet-tiny and the config.json that says it to everyone else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

IGNORED = ["lm_head", "re:.*self_attn.*", "re:.*mlp[.]gate$", "re:.*embed_tokens$"]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A qwen3_moe geometry; every layer is MoE, the embedding is tied."""

    vocab: int = 1024
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 32
    top_k: int = 4
    moe_inter: int = 64
    context: int = 4096
    rope_theta: float = 1_000_000.0
    eps: float = 1e-6


def quantization() -> dict[str, Any]:
    """compressed-tensors: routed experts MXFP4, activations untouched, all else plain."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    }
    group = {"targets": ["Linear"], "weights": weights, "format": "mxfp4-pack-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": IGNORED,
    }


def hf_config(g: Geometry, *, eos: int, pad: int, quantized: bool) -> dict[str, Any]:
    """config.json of a stock qwen3_moe checkpoint with this geometry."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "decoder_sparse_step": 1,
        "head_dim": g.head_dim,
        "hidden_act": "silu",
        "hidden_size": g.hidden,
        "initializer_range": 0.02,
        "intermediate_size": g.moe_inter * g.top_k,
        "max_position_embeddings": g.context,
        "max_window_layers": g.layers,
        "mlp_only_layers": [],
        "moe_intermediate_size": g.moe_inter,
        "norm_topk_prob": True,
        "num_attention_heads": g.heads,
        "num_experts": g.experts,
        "num_experts_per_tok": g.top_k,
        "num_hidden_layers": g.layers,
        "num_key_value_heads": g.kv_heads,
        "output_router_logits": False,
        "rms_norm_eps": g.eps,
        "rope_theta": g.rope_theta,
        "rope_scaling": None,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": g.vocab,
    }
    if quantized:
        config["quantization_config"] = quantization()
    return config


def from_hf_config(config: dict[str, Any]) -> Geometry:
    """The geometry a config.json describes."""
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    return Geometry(
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        experts=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        moe_inter=config["moe_intermediate_size"],
        context=config["max_position_embeddings"],
        rope_theta=theta,
        eps=config["rms_norm_eps"],
    )
