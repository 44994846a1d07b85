"""How much memory the KV cache gets when the user does not say."""

from __future__ import annotations

import math
import re
from typing import Any

from moet.base.errors import CheckpointError

SEQUENCES = 8  # whole contexts that the cache holds, where memory allows
LEAST_BYTES = 64 << 20
SHARE = 0.25  # of the available memory at most
BLOCK_TOKENS = 128  # vLLM's on the CPU; it keeps one block back
VALUE_BYTES = 2
# Kinds of rotary embedding whose stretching max_position_embeddings contains already, to vLLM.
CONTAINED = (None, "default", "su", "longrope", "llama3", "yarn", "deepseek_yarn")

_SUFFIX = {"": 1} | {
    letter: base**power
    for letters, base in (("kmgt", 1000), ("KMGT", 1024))
    for power, letter in enumerate(letters, start=1)
}


def parse_count(text: str) -> int | None:
    """``4096``, ``32k`` (decimal) or ``32K`` (binary), as vLLM reads numbers; None for ``auto``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", text)
    count = float(match[1]) * _SUFFIX[match[2]] if match else math.inf
    return int(count) if math.isfinite(count) else None


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that holds the language model's numbers."""
    part = config.get("text_config")
    return part if isinstance(part, dict) and part else config


def context_length(config: dict[str, Any]) -> int:
    """Tokens that the checkpoint was made for; 0 when it does not say.

    Raises:
        CheckpointError: what it says is no number of tokens.
    """
    length = _text(config).get("max_position_embeddings") or 0
    if type(length) is not int or length < 0:
        hint = "repair config.json, or download it again"
        raise CheckpointError(
            f"max_position_embeddings is {length!r:.80} in config.json", hint=hint
        )
    return length


def longest_context(config: dict[str, Any]) -> int:
    """The longest context that vLLM takes without being overruled; 0 when that is not known here.

    Models whose rotary embedding is stretched by a factor that their length does not contain are
    left to vLLM.
    """
    text = _text(config)
    for key in ("rope_scaling", "rope_parameters"):
        scaling = text.get(key) or {}
        kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else ""
        if kind not in CONTAINED:
            return 0
    own = text.get("model_max_length")
    return max(context_length(config), own if type(own) is int else 0)


def bytes_per_token(config: dict[str, Any]) -> int | None:
    """KV bytes of one token in all layers; None for models that keep other things than K and V."""
    text = _text(config)
    latent = any(key in text for key in ("kv_lora_rank", "o_lora_rank", "linear_attn_config"))
    layers, width = text.get("num_hidden_layers"), text.get("head_dim")
    hidden, all_heads = text.get("hidden_size"), text.get("num_attention_heads")
    heads = text.get("num_key_value_heads") or all_heads
    if not width and isinstance(hidden, int) and isinstance(all_heads, int) and all_heads:
        width = hidden // all_heads
    if latent or not (
        isinstance(layers, int) and isinstance(heads, int) and isinstance(width, int)
    ):
        return None
    return 2 * VALUE_BYTES * layers * heads * width


def budget(token_bytes: int, context: int, available: int) -> int:
    """Bytes: several whole contexts, at most a share of the memory, at least one context.

    Args:
        token_bytes: of ``bytes_per_token``.
        context: tokens.
        available: bytes that are free before anything is loaded.
    """
    one = token_bytes * (context + 2 * BLOCK_TOKENS)
    wanted = max(LEAST_BYTES, SEQUENCES * one)
    return max(one, min(wanted, int(available * SHARE)))
