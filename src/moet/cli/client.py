"""A small client of OpenAI's chat API, enough to stream an answer and to name what went wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from moet.base.errors import EngineError, UsageError

Message = dict[str, Any]
PIECE_SECONDS = 600.0  # between two pieces of an answer; the server's own watchdog is faster


@dataclass
class Answer:
    """An answer, while it arrives and after.

    Attributes:
        pieces: what has come so far.
        prompt_tokens, tokens: as the server counted them; 0 until the end.
        first, last: seconds from the request to the first and to the last piece.
    """

    pieces: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    first: float = 0.0
    last: float = 0.0

    @property
    def text(self) -> str:
        """All pieces."""
        return "".join(self.pieces)

    @property
    def rate(self) -> float:
        """Tokens a second after the first one; 0 when there is no second one."""
        seconds = self.last - self.first
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else 0.0


@contextmanager
def _named(url: str) -> Iterator[None]:
    """Turns failures of the connection into errors that say what happened."""
    try:
        yield
    except httpx.ConnectError as error:
        hint = "start one: moet serve demo"
        raise EngineError(f"no server answers at {url}", hint=hint) from error
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        hint = "write it like http://127.0.0.1:8000"
        raise UsageError(f"{url!r} is not the URL of a server: {error}", hint=hint) from error
    except httpx.HTTPError as error:
        hint = "the server's terminal or log says why"
        raise EngineError(f"the connection to {url} has broken: {error}", hint=hint) from error


def _refusal(status: int, body: str) -> EngineError:
    """An error response as an error of ours."""
    try:
        error = json.loads(body)["error"]
        message = error if isinstance(error, str) else str(error["message"])
    except (ValueError, KeyError, TypeError):
        message = body.strip()[:300] or "no reason given"
    hint = "set MOET_API_KEY to the server's key" if status == httpx.codes.UNAUTHORIZED else ""
    return EngineError(f"the server answers {status}: {message}", hint=hint)


class Client:
    """Talks to one server.

    Args:
        url: ``http://host:port``, with or without ``/v1``.
        api_key: sent with every request where there is one.
        model: as the server calls it; empty: the first that it lists.
    """

    def __init__(self, url: str, api_key: str = "", model: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(PIECE_SECONDS, connect=5.0)
        with _named(url):
            self._http = httpx.Client(
                base_url=self.url, headers=headers, timeout=timeout, trust_env=False
            )
        self.model = model or self.models()[0]

    def models(self) -> list[str]:
        """Names of what the server serves."""
        return [str(entry["id"]) for entry in self.get("/v1/models")["data"]]

    def get(self, path: str) -> Any:
        """A JSON answer."""
        with _named(self.url):
            response = self._http.get(path)
        if response.status_code != httpx.codes.OK:
            raise _refusal(response.status_code, response.text)
        return response.json()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """A JSON answer to a JSON request."""
        with _named(self.url):
            response = self._http.post(path, json={"model": self.model, **body})
        if response.status_code != httpx.codes.OK:
            raise _refusal(response.status_code, response.text)
        return response.json()

    def stream(self, messages: list[Message], answer: Answer, **options: Any) -> Iterator[str]:
        """The pieces of an answer as they come; ``answer`` collects them and the figures.

        Raises:
            EngineError: the server refuses, fails half-way, or is gone.
        """
        body = {"model": self.model, "messages": messages, "stream": True, **options}
        body["stream_options"] = {"include_usage": True}
        began = time.monotonic()
        for event in self._events("/v1/chat/completions", body):
            if usage := event.get("usage"):
                answer.prompt_tokens = usage["prompt_tokens"]
                answer.tokens = usage["completion_tokens"]
            for choice in event.get("choices", ()):
                if piece := choice["delta"].get("content"):
                    answer.last = time.monotonic() - began
                    answer.first = answer.first or answer.last
                    answer.pieces.append(piece)
                    yield piece

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Server-sent events. An answer that ends without ``[DONE]`` was cut off."""
        with _named(self.url), self._http.stream("POST", path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise _refusal(response.status_code, response.read().decode(errors="replace"))
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data:"):
                    event = json.loads(line.removeprefix("data:"))
                    if "error" in event:
                        raise _refusal(int(event["error"].get("code") or 500), json.dumps(event))
                    yield event
        raise EngineError("the answer was cut off", hint="the server's log says why")
