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
GET_SECONDS = 30.0  # for what a server knows without thinking
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
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise _no_server(url, str(error)) from error
    except UnicodeEncodeError as error:
        hint = "the terminal and its locale should speak UTF-8"
        raise UsageError("the question is not UTF-8", hint=hint) from error
    except httpx.HTTPError as error:
        what = str(error) or type(error).__name__
        hint = "the server's terminal or log says why"
        raise EngineError(f"the connection to {url} has broken: {what}", hint=hint) from error


def _no_server(url: str, why: str) -> EngineError:
    """Nobody is there, nobody can be, or nobody who speaks TLS."""
    if "SSL" in why:
        hint = "a server without TLS is called http://..."
        return EngineError(f"no server with TLS answers at {url}: {why}", hint=hint)
    if "Name or service" in why or "name resolution" in why:
        return EngineError(f"no server answers at {url}: {why}", hint="check the name of the host")
    return EngineError(f"no server answers at {url}", hint="start one: moet serve demo")


@contextmanager
def understood(url: str) -> Iterator[None]:
    """Answers of another form than OpenAI's become an error that says so."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        hint = "is it the URL of a server with OpenAI's API?"
        what = f"{url} answers in a way that moet does not understand: {error!r:.200}"
        raise EngineError(what, hint=hint) from error


def require_url(url: str) -> None:
    """Raises UsageError for what is no URL of a server."""
    try:
        read = httpx.URL(url)
        fits = read.scheme in ("http", "https") and read.host and (read.port or 1) < 2**16
        why = "" if fits else "http or https, a host, a port up to 65535"
    except (httpx.InvalidURL, ValueError) as error:
        fits, why = False, str(error)
    if not fits:
        hint = "write it like http://127.0.0.1:8000"
        raise UsageError(f"{url!r} is not the URL of a server: {why}", hint=hint)


HINTS: dict[int, str] = {
    httpx.codes.BAD_REQUEST: "the server does not take this request; a chat that is too long gets "
    "shorter with /new, an answer with --max-tokens",
    httpx.codes.UNAUTHORIZED: "set MOET_API_KEY to the server's key",
    httpx.codes.FORBIDDEN: "set MOET_API_KEY to the server's key",
    httpx.codes.NOT_FOUND: "is it the URL of a server with OpenAI's API, without a path?",
    httpx.codes.TOO_MANY_REQUESTS: "the server is busy: try again later",
    httpx.codes.SERVICE_UNAVAILABLE: "it starts, stops or has failed: its terminal or log says",
}


def _refusal(status: int, body: str) -> EngineError:
    """An error response as an error of ours."""
    try:
        error = json.loads(body)["error"]
        message = error if isinstance(error, str) else str(error["message"])
    except (ValueError, KeyError, TypeError):
        message = body.strip()[:300] or "no reason given"
    other = "the server's terminal or log says why" if status >= 500 else "is it the right URL?"
    return EngineError(f"the server answers {status}: {message}", hint=HINTS.get(status, other))


def _error_event(event: dict[str, Any]) -> EngineError:
    """An error in the middle of an answer."""
    error = event["error"]
    code = error.get("code") if isinstance(error, dict) else None
    return _refusal(code if type(code) is int else 500, json.dumps(event))


class Client:
    """Talks to one server.

    Args:
        url: ``http://host:port``, with or without ``/v1``.
        api_key: sent with every request where there is one.
        model: as the server calls it; empty: the first that it lists.
    """

    def __init__(self, url: str, api_key: str = "", model: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        require_url(url)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(PIECE_SECONDS, connect=5.0)
        with _named(url):
            self._http = httpx.Client(
                base_url=self.url, headers=headers, timeout=timeout, trust_env=False
            )
        self.model = model or self.models()[0]

    def models(self) -> list[str]:
        """Names of what the server serves."""
        with understood(self.url):
            names = [str(entry["id"]) for entry in self.get("/v1/models")["data"]]
            if not names:
                raise ValueError("it serves no model")
            return names

    def get(self, path: str) -> Any:
        """A JSON answer."""
        with _named(self.url):
            response = self._http.get(path, timeout=GET_SECONDS)
        return self._json(response)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """A JSON answer to a JSON request."""
        with _named(self.url):
            response = self._http.post(path, json={"model": self.model, **body})
        return self._json(response)

    def _json(self, response: httpx.Response) -> Any:
        if response.status_code != httpx.codes.OK:
            raise _refusal(response.status_code, response.text)
        with understood(self.url):
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
            for piece in self._pieces(event, answer):
                answer.last = time.monotonic() - began
                answer.first = answer.first or answer.last
                answer.pieces.append(piece)
                yield piece

    def _pieces(self, event: dict[str, Any], answer: Answer) -> list[str]:
        """The text in an event; the figures in it go into ``answer``."""
        with understood(self.url):
            if usage := event.get("usage"):
                answer.prompt_tokens = int(usage["prompt_tokens"])
                answer.tokens = int(usage["completion_tokens"])
            choices = event.get("choices") or ()
            pieces = [choice["delta"].get("content") for choice in choices]
            return [str(piece) for piece in pieces if piece]

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Server-sent events. An answer that ends without ``[DONE]`` was cut off."""
        with _named(self.url), self._http.stream("POST", path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise _refusal(response.status_code, response.read().decode(errors="replace"))
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data:"):
                    with understood(self.url):
                        event = json.loads(line.removeprefix("data:"))
                        failed = "error" in event
                    if failed:
                        raise _error_event(event)
                    yield event
        raise EngineError("the answer was cut off", hint="the server's log says why")
