"""The tokenizer and its chat template."""

from __future__ import annotations

import json
from random import Random

import pytest

import moet.demo
from moet.demo.tasks import heldout

tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
FOLDER = moet.demo.path()
TOKENIZER = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "12 + 7 = 19",
        '{"a": [1, 2]}',
        "naïve café 猫 🦊",
        "def f(x):\n    return x",
        "  ",
    ],
)
def test_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_every_digit_is_its_own_token() -> None:
    assert TOKENIZER.encode("9071").tokens == list("9071")
    assert not any(any(c.isdigit() for c in t) and len(t) > 1 for t in TOKENIZER.get_vocab())


def test_size_matches_the_config() -> None:
    config = json.loads((FOLDER / "config.json").read_text("utf-8"))
    assert TOKENIZER.get_vocab_size() == config["vocab_size"]


def test_tool_marks_are_single_visible_tokens() -> None:
    ids = TOKENIZER.encode("<tool_call>").ids
    assert len(ids) == 1
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<tool_call>"
    assert TOKENIZER.decode(TOKENIZER.encode("<|im_end|>").ids, skip_special_tokens=True) == ""


def test_held_out_prompts_fit_the_context_with_their_replies() -> None:
    chat = pytest.importorskip("training.chat")
    for sample in heldout("recall", 60, 0):
        assert len(TOKENIZER.encode(chat.prompt(sample) + sample.answer).ids) < 4090


def test_segments_encode_like_the_whole() -> None:
    mixture = pytest.importorskip("training.mixture")
    for seed in range(30):
        talk = mixture.conversation(Random(seed), 512)
        texts = [text for _ in range(8) for text, _ in next(talk)]
        whole = TOKENIZER.encode("".join(texts)).ids
        assert [i for text in texts for i in TOKENIZER.encode(text).ids] == whole
