"""A served model as `verify.quality` wants it: whole answers and log-probabilities over HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from moet.base.errors import EngineError
from moet.cli.client import Client, understood

CHAT = "/v1/chat/completions"


class ServedModel:
    """Answers greedily. Safe to call from several threads."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def reply(self, messages: Sequence[Any], tools: Sequence[Any], max_tokens: int) -> str:
        """The text of the answer; a tool call as the model wrote it."""
        body: dict[str, Any] = {
            "messages": list(messages),
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        if tools:
            body["tools"] = list(tools)
        with understood(self.client.url):
            message = self.client.post(CHAT, body)["choices"][0]["message"]
            calls = [_as_text(call["function"]) for call in message.get("tool_calls") or ()]
            return "\n".join([message.get("content") or "", *calls]).strip()

    def log_probs(self, messages: Sequence[Any], answer: str) -> list[float]:
        """Natural log-probabilities of the answer's tokens.

        The answer is put into the chat as an unfinished message; where it begins is where the chat
        without it ends.
        """
        asked = {"messages": list(messages), "add_generation_prompt": True}
        with understood(self.client.url):
            before = int(self.client.post("/tokenize", asked)["count"])
        body = {
            "messages": [*messages, {"role": "assistant", "content": answer}],
            "add_generation_prompt": False,
            "continue_final_message": True,
            "prompt_logprobs": 0,
            "max_tokens": 1,
        }
        with understood(self.client.url):
            every = self.client.post(CHAT, body).get("prompt_logprobs")
            if every and len(every) > before:
                return [_own(entry) for entry in every[before:]]
        hint = "log-probabilities of prompts need a vLLM server"
        raise EngineError("the server gives no log-probabilities of the prompt", hint=hint)


def _own(entry: dict[str, Any]) -> float:
    """The log-probability of the token that stands there: the only one that was asked for."""
    (value,) = entry.values()
    return float(value["logprob"])


def _as_text(function: dict[str, Any]) -> str:
    """A parsed tool call as text again; arguments that are no JSON stay as they are."""
    name, arguments = json.dumps(function["name"]), function["arguments"]
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
