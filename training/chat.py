"""The chat template in Python, as weighted segments; the test holds it to chat_template.jinja."""

from __future__ import annotations

import json
from collections.abc import Sequence

from moet.demo.tasks.base import Sample, Tool

Segment = tuple[str, int]
ANSWER = 100
END = "<|im_end|>"


def system(text: str | None, tools: Sequence[Tool]) -> list[Segment]:
    """The system message, if there is anything to say."""
    parts = [text] if text else []
    if tools:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        parts.append(f"You can call these tools:\n<tools>\n{lines}\n</tools>")
    return [("<|im_start|>system\n" + "\n\n".join(parts) + END + "\n", 0)] if parts else []


def ask(role: str, text: str, percent: int) -> list[Segment]:
    """A user's or tool's message, and the header of the reply."""
    header = f"{END}\n<|im_start|>assistant\n"
    return [(f"<|im_start|>{role}\n", 0), (text, percent), (header, 0)]


def reply(text: str) -> list[Segment]:
    """The assistant's words and its end token, which is what training is about."""
    return [(text + END, ANSWER), ("\n", 0)]


def prompt(sample: Sample) -> str:
    """A held-out sample up to where the model speaks."""
    segments = system(None, sample.tools)
    for message in sample.messages:
        segments += ask(message["role"], message["content"], 0)
    return "".join(text for text, _ in segments)
