"""``/health`` that tells the truth, and what happens when the truth is bad.

An ASGI middleware around vLLM's API server (``--middleware moet.engine.health.Readiness``).

- ``/health`` is 503 until one real token, with a finite log-probability, has come out of the whole
  engine and moet's workers have counted steps for it.
- From then on a watcher looks four times a second. The engine is dead when vLLM says so, or when
  there was work (a request waits, or a step is in flight) for ``stall_seconds`` in all and no
  worker's heartbeat has moved. Requests that gave up meanwhile do not set that time back.
- A dead engine turns ``/health`` to 503, ends every request in flight with an error, and then the
  process (``apiserver`` says how).
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from moet.base import env, log
from moet.base.errors import EngineError, MoetError
from moet.engine.flight import App, Flight, Receive, Scope, Send, error_body, respond
from moet.engine.heartbeat import Page, Phase
from moet.engine.watchdog import Watchdog

HEALTH_PATHS = ("/health", "/ping")
TURN_SECONDS = 0.25
FIRST_TOKEN_SECONDS = 300.0  # the least that a first step may stand still: it warms everything up
PROBE_TOKEN = 1  # any token will do; every vocabulary has this one
STOPPING = "the server is stopping"
LOG_HINT = "the server's log says more"

_log = log.get("engine")


class Health:
    """What one API server knows about its engine.

    Args:
        page: the server's heartbeat page; without one only vLLM's own word counts.
        stall_seconds: see ``Settings``.
        on_failure: called once, in the event loop, after the requests were told.
        probe: has the engine generate one token, or raises.
    """

    def __init__(
        self,
        page: Page | None,
        stall_seconds: float,
        on_failure: Callable[[], None] = lambda: None,
        probe: Callable[[Any], Awaitable[None]] | None = None,
    ) -> None:
        self.page = page
        self._probe = probe or first_token
        self.failure: MoetError | None = None
        self.ready = False
        self._flights: set[Flight] = set()
        self._watchdog = Watchdog(max(stall_seconds, FIRST_TOKEN_SECONDS))
        self._stall_seconds = stall_seconds
        self._on_failure = on_failure
        self._engine: Any = None
        self._sent = 0  # chunks of flights that have landed

    @property
    def is_stopping(self) -> bool:
        """Whether the supervisor has said that the end is wanted."""
        return self.page is not None and self.page.phase is Phase.STOPPING

    async def fly(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs one request; it can be ended by ``fail``."""
        refusal = self.failure or (EngineError(STOPPING) if self.is_stopping else None)
        if refusal is not None:
            await respond(send, 503, error_body(refusal))
            return
        flight = Flight(send, self._look_for_death)
        self._flights.add(flight)
        try:
            await flight.run(app, scope, receive)
        finally:
            self._flights.discard(flight)
            self._sent += flight.chunks

    def fail(self, error: MoetError) -> None:
        """The engine is dead: say so everywhere. The first reason stays."""
        if self.failure is not None or self.is_stopping:
            return
        _log.error("%s", error)
        self.failure, self.ready = error, False
        if self.page is not None:
            self.page.fail(error)
        self._break_off(error)
        self._on_failure()

    def _break_off(self, error: MoetError) -> None:
        for flight in tuple(self._flights):
            flight.break_off(error)

    async def live(self, engine: Any) -> None:
        """From the end of start-up to the end of the process."""
        self._engine = engine
        probe = asyncio.create_task(self._become_ready(engine))
        try:
            while not self.is_stopping:
                await asyncio.sleep(TURN_SECONDS)
                self.look(engine)
            self._break_off(EngineError(STOPPING))
        finally:
            probe.cancel()

    def look(self, engine: Any) -> None:
        """One turn of the watcher."""
        if self.page is not None:
            self.page.beat_loop()
        waiting = engine.get_num_unfinished_requests()
        if engine.errored:
            self.fail(EngineError("the engine has died", hint=LOG_HINT))
        elif self.page is not None and self._watchdog.observe(
            time.monotonic(),
            busy=waiting > 0 or self.page.is_stepping,
            progress=self._progress(),
        ):
            seconds = self._watchdog.stood_still
            message = f"the engine has stood still for {seconds:.0f} s with {waiting} requests"
            hint = f"{LOG_HINT}; MOET_STALL_SECONDS is the limit, {self._watchdog.limit:g} s now"
            self.fail(EngineError(message, hint=hint))

    def _look_for_death(self) -> None:
        if self._engine is not None and self._engine.errored:
            self.look(self._engine)

    def _progress(self) -> object:
        chunks = self._sent + sum(flight.chunks for flight in self._flights)
        return (self.page.beats if self.page else 0, chunks)

    async def _become_ready(self, engine: Any) -> None:
        try:
            if self.page is not None:
                self.page.phase = Phase.PROBING
            before = self.page.beats if self.page else 0
            await self._probe(engine)
            if self.page is not None and self.page.beats == before:
                hint = "another plugin may have replaced them: set VLLM_PLUGINS=moet"
                raise EngineError("the engine ran a step without moet's experts", hint=hint)
        except MoetError as error:
            self.fail(error)
        except Exception as error:
            _log.exception("the first token")
            self.fail(EngineError(f"the engine cannot generate: {error}", hint=LOG_HINT))
        else:
            self.ready = self.failure is None
            self._watchdog = Watchdog(self._stall_seconds)
            if self.page is not None and self.ready and not self.is_stopping:
                self.page.phase = Phase.READY

    def report(self) -> tuple[int, bytes]:
        """Status and body of ``/health``."""
        if self.ready and not self.is_stopping:
            return 200, b'{"status": "ready"}'
        status = "failed" if self.failure else "stopping" if self.is_stopping else "starting"
        reason = {"reason": str(self.failure)} if self.failure else {}
        return 503, json.dumps({"status": status, **reason}).encode()


async def first_token(engine: Any) -> None:
    """Has the engine generate one token.

    Raises:
        EngineError: no token came out, or its probability is not a number.
    """
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, ignore_eos=True)
    prompt = TokensPrompt(prompt_token_ids=[PROBE_TOKEN])
    async for output in engine.generate(prompt, params, request_id="moet-first-token"):
        final = output.outputs[0]
    if len(final.token_ids) != 1 or not math.isfinite(final.cumulative_logprob):
        raise EngineError(
            f"the first token is {list(final.token_ids)}, log-prob {final.cumulative_logprob}",
            hint="the weights may be damaged: moet verify bits checks the arithmetic",
        )


_current: Health | None = None


def install(health: Health) -> None:
    """Makes ``health`` the one that the middleware of this process uses."""
    global _current  # noqa: PLW0603  (vLLM makes the middleware by its name, with no arguments)
    _current = health


def current() -> Health:
    """The installed health; under a plain vLLM server one is made from the environment."""
    if _current is None:
        settings = env.read()
        page = Page.open(settings.heartbeat) if settings.heartbeat else None
        install(Health(page, settings.stall_seconds))
    assert _current is not None
    return _current


class Readiness:
    """The middleware. Requests that only ask (GET) pass; those that make work can be ended."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.health = current()
        self._life: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] in HEALTH_PATHS:
            await respond(send, *self.health.report())
        elif scope["type"] == "http" and scope["method"] == "POST":
            await self.health.fly(self.app, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine = scope["app"].state.engine_client

        async def forward(message: Any) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._life = asyncio.create_task(self.health.live(engine))
            await send(message)

        try:
            await self.app(scope, receive, forward)
        finally:
            if self._life is not None:
                self._life.cancel()
