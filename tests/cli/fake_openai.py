"""A server that speaks OpenAI's chat API and does what the question says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = ["12", " + 30", " = 42"]


class Handler(BaseHTTPRequestHandler):
    """``hello``, ``slow``, ``cut``, ``error``, ``long``: see ``do_POST``."""

    requests: list[dict[str, Any]]

    def log_message(self, *_: Any) -> None:
        """Silence."""

    def do_GET(self) -> None:
        self.whole(200, {"data": [{"id": "fake"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        key = self.headers.get("authorization", "")
        self.requests.append({**body, "key": key})
        question = body["messages"][-1]["content"]
        if question == "long":
            self.whole(400, {"error": {"message": "the context is too long", "code": 400}})
        elif question == "key":
            self.whole(401, {"error": {"message": "a valid API key is needed"}})
        else:
            self.stream(question)

    def whole(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, question: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for word in WORDS:
            self.event({"choices": [{"delta": {"content": word}}]})
        if question == "cut":
            return
        if question == "error":
            self.event({"error": {"message": "the engine has died", "code": 503}})
        while question == "slow":
            time.sleep(0.05)
            try:
                self.event({"choices": [{"delta": {"content": "."}}]})
            except OSError:
                return
        usage = {"prompt_tokens": 7, "completion_tokens": len(WORDS)}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, data: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        self.wfile.flush()


@contextmanager
def running(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """URL of a server that lives as long as the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def odd_server(models: bytes, events: bytes) -> Iterator[str]:
    """URL of a server that says the same whatever it is asked."""

    class Odd(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Silence."""

        def do_GET(self) -> None:
            self.say(models)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.say(events)

        def say(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with running(Odd) as url:
        yield url


@contextmanager
def fake_openai() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """URL of a running server, and the requests that it gets."""
    requests: list[dict[str, Any]] = []
    handler = type("Recording", (Handler,), {"requests": requests})
    with running(handler) as url:
        yield url, requests
