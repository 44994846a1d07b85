"""One way to mark a reply, for the trainer, the tests and `moet verify quality`."""

from __future__ import annotations

import json
import re
from typing import Any

from moet.demo.tasks.base import Sample

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
NUMBER = re.compile(r"-?\d+")


def parse_json(reply: str) -> Any:
    """The reply's JSON, or that of its tool call. ValueError if it is neither."""
    found = CALL.search(reply)
    return json.loads(found.group(1) if found else reply)


def valid_json(reply: str) -> bool:
    """Whether the reply holds well-formed JSON."""
    try:
        parse_json(reply)
    except ValueError:
        return False
    return True


def last_number(text: str) -> str | None:
    """The last whole number in a text."""
    found = NUMBER.findall(text)
    return found[-1] if found else None


def correct(sample: Sample, reply: str) -> bool:
    """Sums by their last number, JSON by value, recall by the last word, text by the letter."""
    if sample.kind in ("addition", "subtraction", "multiplication"):
        return last_number(reply) == last_number(sample.answer)
    if sample.kind == "json":
        return valid_json(reply) and bool(parse_json(reply) == parse_json(sample.answer))
    if sample.kind == "recall":
        words = re.findall(r"\w+", reply)
        return bool(words) and words[-1] == sample.facts["value"]
    return reply.strip() == sample.answer
