"""The API key guards everything. vLLM's own check covers /v1 and leaves other doors open.

An ASGI middleware (``--middleware moet.engine.access.ApiKey``): without the key a client sees
``/health`` and nothing else: not ``/invocations``, ``/tokenize`` or ``/metrics`` either.
"""

from __future__ import annotations

import hashlib
import hmac

from moet.base import env
from moet.engine.flight import App, Receive, Scope, Send, respond
from moet.engine.health import HEALTH_PATHS

UNAUTHORISED = b'{"error": {"message": "a valid API key is needed", "type": "AuthenticationError"}}'


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


class ApiKey:
    """Asks every HTTP and WebSocket request for the key in ``MOET_API_KEY``, if there is one."""

    def __init__(self, app: App) -> None:
        self.app = app
        key = env.read().api_key
        self._wanted = _digest(b"bearer " + key.encode()) if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await respond(send, 401, UNAUTHORISED)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _may_pass(self, scope: Scope) -> bool:
        if self._wanted is None or scope["path"] in HEALTH_PATHS:
            return True
        if scope.get("method") == "OPTIONS":  # a browser's question, which carries no key
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        return hmac.compare_digest(_digest(scheme.lower() + b" " + key), self._wanted)
