"""Small random checkpoints in every family, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moet.checkpoint.synth import SynthModel
from moet.checkpoint.synth.presets import DEEPSEEK_V4_FLASH, GPT_OSS_20B, QWEN3_30B_A3B

FAMILIES = ("qwen3_moe", "deepseek_v4", "gpt_oss")

# What makes the rest of each model small, in sizes that the engine's kernels accept.
_SMALL: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **QWEN3_30B_A3B,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "gpt_oss": {
        **GPT_OSS_20B,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    "deepseek_v4": {
        **DEEPSEEK_V4_FLASH,
        "num_attention_heads": 16,
        "q_lora_rank": 128,
        "o_lora_rank": 128,
        "o_groups": 4,
        "max_position_embeddings": 4096,
        "num_hash_layers": 0,
    },
}


def toy_config(
    family: str = "qwen3_moe",
    *,
    hidden: int = 64,
    intermediate: int = 64,
    experts: int = 8,
    layers: int = 2,
    top_k: int = 2,
    vocab: int = 512,
    **extra: Any,
) -> dict[str, Any]:
    """config.json of a small model; ``extra`` sets further keys.

    For deepseek_v4 the engine wants ``intermediate`` in multiples of 128 (its shared experts are
    FP8 in blocks of 128 rows) and 64 or more experts, top 6, for that family's router.
    """
    ours: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_experts_per_tok": top_k,
        "vocab_size": vocab,
    }
    if family == "gpt_oss":
        ours |= {"intermediate_size": intermediate, "num_local_experts": experts}
        ours |= {"experts_per_token": top_k}
        ours |= {"layer_types": (["sliding_attention", "full_attention"] * layers)[:layers]}
    elif family == "deepseek_v4":
        ours |= {"moe_intermediate_size": intermediate, "n_routed_experts": experts}
        ours |= {"compress_ratios": [0, *([4, 128] * layers)][:layers]}
    else:
        ours |= {"moe_intermediate_size": intermediate, "num_experts": experts}
        ours |= {"max_window_layers": layers}
    return {**_SMALL[family], **ours, **extra}


def toy_model(
    family: str = "qwen3_moe", *, seed: int = 0, zipf: float = 0.0, **sizes: Any
) -> SynthModel:
    """The model of ``toy_config(family, **sizes)``, in memory."""
    return SynthModel(toy_config(family, **sizes), seed=seed, zipf=zipf)


def write_toy_checkpoint(
    path: Path,
    family: str = "qwen3_moe",
    *,
    seed: int = 0,
    zipf: float = 0.0,
    shards: int = 1,
    **sizes: Any,
) -> SynthModel:
    """Writes a small checkpoint of about ``shards`` files and returns the model that is in it.

    Args:
        path: a new or empty folder.
        family: one of ``FAMILIES``.
        seed: what is drawn.
        zipf: skew of the routers.
        shards: 1 writes model.safetensors, more write shards and an index.
        sizes: of ``toy_config``.
    """
    model = toy_model(family, seed=seed, zipf=zipf, **sizes)
    model.write(path, shard_bytes=-(-model.nbytes // shards) if shards > 1 else model.nbytes)
    return model
