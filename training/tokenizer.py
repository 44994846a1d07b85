"""The tokenizer: byte-level BPE, every digit its own token, ChatML with tools."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.export import write_json

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tools>", "</tools>")
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def train(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Fit the merges; ids 0..6 are CONTROL then MARKS, then the 256 bytes."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[
            *(AddedToken(t, special=True, normalized=False) for t in CONTROL),
            *(AddedToken(t, special=False, normalized=False) for t in MARKS),
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def with_plain_marks(tokenizer: Tokenizer) -> dict[str, Any]:
    """Its JSON; the trainer calls all its tokens special, but MARKS are text to be read."""
    out: dict[str, Any] = json.loads(tokenizer.to_str())
    for token in out["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    return out


def save(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "tokenizer.json", with_plain_marks(tokenizer))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
    }
    write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text("utf-8"), "utf-8")
