"""chat_template.jinja, as transformers renders it, against what training saw."""

from __future__ import annotations

import json

import pytest

import moet.demo
from moet.demo.tasks import heldout

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
chat = pytest.importorskip("training.chat", reason="the training folder is not beside the tests")


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(str(moet.demo.path()))


def render(tokenizer, messages, tools=None, generate=True):
    return tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=generate
    )


@pytest.mark.parametrize("kind", ["addition", "json", "recall"])
def test_prompts_are_those_of_training(tokenizer, kind) -> None:
    for sample in heldout(kind, 20, 9):
        tools = list(sample.tools) or None
        assert render(tokenizer, list(sample.messages), tools) == chat.prompt(sample)


def test_system_tools_call_and_result(tokenizer) -> None:
    sample = next(s for s in heldout("json", 50, 1) if s.tools)
    call = {"name": "f", "arguments": {"a": 1}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": '{"ok": true}'},
    ]
    expected = chat.system("Be brief.", sample.tools) + chat.ask("user", "Go.", 0)
    expected += chat.reply(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
    expected += chat.ask("tool", '{"ok": true}', 0)
    wanted = "".join(text for text, _ in expected)
    assert render(tokenizer, messages, list(sample.tools)) == wanted


def test_arguments_may_come_as_text(tokenizer) -> None:
    def turn(arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]

    as_text = render(tokenizer, turn('{"a": 1}'), generate=False)
    assert as_text == render(tokenizer, turn({"a": 1}), generate=False)


def test_end_of_turn_is_the_end_of_sequence(tokenizer) -> None:
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
