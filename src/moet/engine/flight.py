"""A request in flight that can be ended from outside with an error its client understands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from moet.base.errors import MoetError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

UNAVAILABLE = 503


def error_body(error: MoetError, status: int = UNAVAILABLE) -> bytes:
    """An error object as the OpenAI API writes it."""
    body = {"message": str(error), "type": "ServiceUnavailableError", "param": None, "code": status}
    return json.dumps({"error": body}).encode()


async def respond(send: Send, status: int, body: bytes, kind: str = "application/json") -> None:
    """One whole response."""
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Flight:
    """Runs an ASGI application on one request, until it is done or the flight is broken.

    Args:
        send: towards the client.
        look: called before anything is sent; may break this flight off. The application's own
            account of a dead engine is less clear than ours.
    """

    def __init__(self, send: Send, look: Callable[[], None] = lambda: None) -> None:
        self._send = send
        self._look = look
        self._broken: asyncio.Future[MoetError] = asyncio.get_running_loop().create_future()
        self._kind: bytes | None = None  # content type once the response has started
        self._done = False
        self.chunks = 0  # pieces of the response that were sent: progress that the client sees

    def break_off(self, error: MoetError) -> None:
        """Ends the request with ``error``; once is enough."""
        if not self._broken.done():
            self._broken.set_result(error)

    async def run(self, app: App, scope: Scope, receive: Receive) -> None:
        """Returns when the client has its response, or the error instead."""
        work = asyncio.ensure_future(app(scope, receive, self._forward))
        either: set[asyncio.Future[Any]] = {work, self._broken}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done() and not self._done:
                await self._tell(self._broken.result())
            else:
                await work
        finally:
            work.cancel()
            self._broken.cancel()

    async def _forward(self, message: Message) -> None:
        """What the application sends; nothing gets past an error."""
        self._look()
        if self._broken.done():
            return
        if message["type"] == "http.response.start":
            headers = {bytes(k).lower(): bytes(v) for k, v in message.get("headers", ())}
            self._kind = headers.get(b"content-type", b"")
        else:
            self.chunks += 1
            self._done = not message.get("more_body", False)
        await self._send(message)

    async def _tell(self, error: MoetError) -> None:
        """The error as a response, or as the last event of a stream.

        A response of another kind that has begun cannot be mended: it ends before its announced
        length, which every client reports.
        """
        if self._kind is None:
            await respond(self._send, UNAVAILABLE, error_body(error))
        elif self._kind.startswith(b"text/event-stream"):
            event = b"data: " + error_body(error) + b"\n\ndata: [DONE]\n\n"
            await self._send({"type": "http.response.body", "body": event})
