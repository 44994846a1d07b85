"""Readiness, watchdog and dying requests, with an engine that does what the test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moet.base.errors import EngineError
from moet.engine import access, health
from moet.engine.flight import Flight, respond
from moet.engine.health import Health, Readiness
from moet.engine.heartbeat import Page, Phase
from moet.engine.watchdog import Watchdog

HTTP = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}


class FakeEngine:
    """What the middleware uses of vLLM's engine client."""

    def __init__(self) -> None:
        self.errored = False
        self.waiting = 0

    def get_num_unfinished_requests(self) -> int:
        return self.waiting


class Client:
    """Collects what an ASGI application sends."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    async def receive(self) -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages)

    @property
    def is_complete(self) -> bool:
        return bool(self.messages) and not self.messages[-1].get("more_body", False)


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page.create(tmp_path / "beat")


def beating_probe(page: Page) -> Callable[[Any], Awaitable[None]]:
    async def probe(_engine: Any) -> None:
        page.rank(0).beat()
        page.rank(0).beat()

    return probe


async def sleeping_app(_scope: Any, _receive: Any, _send: Any) -> None:
    await asyncio.sleep(60)


async def streaming_app(_scope: Any, _receive: Any, send: Any) -> None:
    headers = [(b"Content-Type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
    await asyncio.sleep(60)


async def plain_app(_scope: Any, _receive: Any, send: Any) -> None:
    await respond(send, 200, b'{"answer": 42}')


# --- watchdog


def test_the_watchdog_counts_only_busy_time_without_progress() -> None:
    dog = Watchdog(limit=2.0)
    assert not dog.observe(0.0, busy=True, progress=0)
    assert not dog.observe(1.0, busy=True, progress=0)
    assert not dog.observe(2.0, busy=True, progress=1)  # moved
    assert not dog.observe(3.0, busy=True, progress=1)
    assert not dog.observe(4.0, busy=False, progress=1)  # idle
    assert dog.stood_still == 1.0
    assert dog.observe(5.0, busy=True, progress=1)
    assert dog.stood_still == 2.0
    assert not dog.observe(6.0, busy=False, progress=2)  # moved after all
    assert dog.stood_still == 0.0


def test_clients_that_give_up_do_not_hide_a_stall() -> None:
    dog, now = Watchdog(limit=120.0), 0.0
    for _ in range(2):
        for _ in range(60):
            now += 1.0
            dog.observe(now, busy=True, progress=7)
        for _ in range(30):
            now += 1.0
            dead = dog.observe(now, busy=False, progress=7)
    assert not dead  # the very first look has nothing to measure from
    assert dog.observe(now + 1.0, busy=True, progress=7)


def test_time_in_which_the_watcher_itself_stood_still_does_not_count() -> None:
    dog = Watchdog(limit=10.0, longest_turn=1.0)
    dog.observe(0.0, busy=True, progress=0)
    assert not dog.observe(3600.0, busy=True, progress=0)
    assert dog.stood_still == 1.0


# --- flights


async def flown(app: Any) -> Client:
    client = Client()
    await Flight(client.send).run(app, HTTP, client.receive)
    return client


def test_a_flight_that_lands_is_untouched() -> None:
    client = asyncio.run(flown(plain_app))
    assert (client.status, client.body, client.is_complete) == (200, b'{"answer": 42}', True)


def test_an_application_error_passes() -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("theirs")

    with pytest.raises(RuntimeError, match="theirs"):
        asyncio.run(flown(broken))


async def broken_off(app: Any) -> Client:
    client = Client()
    flight = Flight(client.send)
    run = asyncio.create_task(flight.run(app, HTTP, client.receive))
    await asyncio.sleep(0.01)
    flight.break_off(EngineError("the engine has died"))
    flight.break_off(EngineError("a second reason"))
    await asyncio.wait_for(run, 1.0)
    return client


def test_a_request_without_a_response_gets_503() -> None:
    client = asyncio.run(broken_off(sleeping_app))
    error = json.loads(client.body)["error"]
    assert client.status == 503
    assert (error["message"], error["code"]) == ("the engine has died", 503)


def test_a_stream_gets_an_error_event_and_ends() -> None:
    client = asyncio.run(broken_off(streaming_app))
    events = client.body.decode().split("\n\n")
    assert client.status == 200
    assert json.loads(events[1].removeprefix("data: "))["error"]["message"] == "the engine has died"
    assert events[2] == "data: [DONE]"
    assert client.is_complete


def test_a_response_of_a_known_length_is_left_short() -> None:
    async def half(_scope: Any, _receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"100")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})
        await asyncio.sleep(60)

    client = asyncio.run(broken_off(half))
    assert client.body == b"{"
    assert not client.is_complete


# --- health


async def living(state: Health, engine: FakeEngine, until: Callable[[], bool]) -> None:
    life = asyncio.create_task(state.live(engine))
    async with asyncio.timeout(5.0):
        while not until():
            await asyncio.sleep(0.01)
    life.cancel()


def test_ready_after_the_first_token_and_not_before(page: Page) -> None:
    gate = asyncio.Event()

    async def probe(_engine: Any) -> None:
        await gate.wait()
        page.rank(0).beat()

    async def scenario() -> None:
        state = Health(page, 60.0, probe=probe)
        assert state.report()[0] == 503
        life = asyncio.create_task(state.live(FakeEngine()))
        await asyncio.sleep(0.02)
        assert state.report() == (503, b'{"status": "starting"}')
        assert page.phase is Phase.PROBING
        gate.set()
        await asyncio.sleep(0.02)
        assert state.report() == (200, b'{"status": "ready"}')
        assert page.phase is Phase.READY
        life.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize("trouble", ["no beat", "moet error", "other error"])
def test_a_first_token_that_does_not_come_ends_the_server(page: Page, trouble: str) -> None:
    async def probe(_engine: Any) -> None:
        if trouble == "moet error":
            raise EngineError("nan")
        if trouble == "other error":
            raise ValueError("vocabulary")

    ended: list[bool] = []
    state = Health(page, 60.0, on_failure=lambda: ended.append(True), probe=probe)
    asyncio.run(living(state, FakeEngine(), lambda: bool(ended)))
    expected = {"no beat": "without moet's experts", "moet error": "nan"}
    assert expected.get(trouble, "cannot generate") in str(page.failure)
    assert state.report()[0] == 503
    assert page.phase is Phase.FAILED


def fails(page: Page, stall: float, trouble: Callable[[FakeEngine], None]) -> tuple[Health, Client]:
    """Runs a server with one request in flight until trouble has ended it."""
    ended: list[bool] = []
    state = Health(page, stall, on_failure=lambda: ended.append(True), probe=beating_probe(page))
    engine, client = FakeEngine(), Client()

    async def scenario() -> None:
        life = asyncio.create_task(state.live(engine))
        while not state.ready:
            await asyncio.sleep(0.01)
        flight = asyncio.create_task(state.fly(streaming_app, HTTP, client.receive, client.send))
        await asyncio.sleep(0.01)
        trouble(engine)
        await asyncio.wait_for(flight, 5.0)
        life.cancel()

    asyncio.run(scenario())
    assert ended == [True]
    return state, client


def test_an_engine_that_died_ends_requests_and_server(page: Page) -> None:
    state, client = fails(page, 60.0, lambda engine: setattr(engine, "errored", True))
    assert b"the engine has died" in client.body
    assert client.body.endswith(b"data: [DONE]\n\n")
    status, body = state.report()
    assert (status, json.loads(body)["status"]) == (503, "failed")


def test_the_engine_s_own_words_do_not_get_past_ours(page: Page) -> None:
    """vLLM tells its requests of a death before the watcher has looked."""
    state, engine, client = Health(page, 60.0, probe=beating_probe(page)), FakeEngine(), Client()

    async def theirs(_scope: Any, _receive: Any, send: Any) -> None:
        engine.errored = True
        await respond(send, 500, b"EngineCore encountered an issue")

    async def scenario() -> None:
        life = asyncio.create_task(state.live(engine))
        await asyncio.sleep(0.02)
        await state.fly(theirs, HTTP, client.receive, client.send)
        life.cancel()

    asyncio.run(scenario())
    assert client.status == 503
    assert b"the engine has died" in client.body


def test_an_engine_that_stands_still_is_dead(page: Page) -> None:
    _, client = fails(page, 0.6, lambda engine: setattr(engine, "waiting", 3))
    assert b"has stood still for 1 s with 3 requests" in client.body
    assert "MOET_STALL_SECONDS" in str(page.failure.hint if page.failure else "")


def test_a_step_that_never_ends_is_dead_without_a_client(page: Page) -> None:
    ended: list[bool] = []
    state = Health(page, 0.6, on_failure=lambda: ended.append(True), probe=beating_probe(page))

    async def scenario() -> None:
        life = asyncio.create_task(state.live(FakeEngine()))
        while not state.ready:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.2)  # idle for longer than the limit
        assert state.failure is None
        page.rank(1).beat()
        async with asyncio.timeout(5.0):
            while not ended:
                await asyncio.sleep(0.05)
        life.cancel()

    asyncio.run(scenario())
    assert "has stood still for 1 s with 0 requests" in str(page.failure)


def test_a_slow_engine_that_beats_lives(page: Page) -> None:
    state = Health(page, 0.6, probe=beating_probe(page))
    engine = FakeEngine()
    engine.waiting = 1

    async def scenario() -> None:
        life = asyncio.create_task(state.live(engine))
        for _ in range(20):
            await asyncio.sleep(0.1)
            page.rank(1).beat()
        life.cancel()

    asyncio.run(scenario())
    assert state.failure is None
    assert page.loop_beats > 4


def test_a_new_request_on_a_dead_engine_is_refused_at_once(page: Page) -> None:
    state = Health(page, 60.0)
    state.fail(EngineError("gone"))
    client = Client()
    asyncio.run(state.fly(sleeping_app, HTTP, client.receive, client.send))
    assert client.status == 503


def test_a_server_that_stops_tells_its_requests_and_does_not_fail(page: Page) -> None:
    state, engine, client = Health(page, 60.0, probe=beating_probe(page)), FakeEngine(), Client()
    late = Client()

    async def scenario() -> None:
        life = asyncio.create_task(state.live(engine))
        await asyncio.sleep(0.05)
        flight = asyncio.create_task(state.fly(streaming_app, HTTP, client.receive, client.send))
        await asyncio.sleep(0.01)
        page.phase = Phase.STOPPING
        engine.errored = True
        await asyncio.wait_for(flight, 5.0)
        await asyncio.wait_for(life, 5.0)
        await state.fly(sleeping_app, HTTP, late.receive, late.send)

    asyncio.run(scenario())
    assert (late.status, b"the server is stopping" in late.body) == (503, True)
    assert b"the server is stopping" in client.body
    assert state.failure is None
    assert page.failure is None
    assert state.report()[0] == 503


# --- middleware


def test_the_middleware_answers_health_itself_and_follows_the_lifespan(page: Page) -> None:
    health.install(Health(page, 60.0, probe=beating_probe(page)))
    asked: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["type"])
        if scope["type"] == "lifespan":
            await send({"type": "lifespan.startup.complete"})
            await receive()
        else:
            await plain_app(scope, receive, send)

    async def scenario() -> None:
        middleware, stop = Readiness(app), asyncio.Event()
        state = SimpleNamespace(state=SimpleNamespace(engine_client=FakeEngine()))
        life = asyncio.create_task(
            middleware({"type": "lifespan", "app": state}, stop.wait, Client().send)
        )
        get = {**HTTP, "method": "GET"}
        async with asyncio.timeout(5.0):
            while True:
                client = Client()
                await middleware({**get, "path": "/health"}, client.receive, client.send)
                if client.status == 200:
                    break
                await asyncio.sleep(0.01)
        for scope in (get, HTTP):
            client = Client()
            await middleware(scope, client.receive, client.send)
            assert client.body == b'{"answer": 42}'
        stop.set()
        await life

    asyncio.run(scenario())
    assert asked == ["lifespan", "http", "http"]


@pytest.mark.parametrize(
    ("path", "given", "status"),
    [
        ("/v1/models", b"Bearer secret", 200),
        ("/v1/models", b"bearer secret", 200),
        ("/v1/models", b"Bearer other", 401),
        ("/v1/models", b"secret", 401),
        ("/v1/models", b"", 401),
        ("/invocations", b"", 401),
        ("/tokenize", b"", 401),
        ("/metrics", b"", 401),
        ("/health", b"", 200),
    ],
)
def test_the_key_guards_every_door(
    monkeypatch: pytest.MonkeyPatch, path: str, given: bytes, status: int
) -> None:
    monkeypatch.setenv("MOET_API_KEY", "secret")
    client = Client()
    headers = [(b"authorization", given)] if given else []
    guard = access.ApiKey(plain_app)
    asyncio.run(guard({**HTTP, "path": path, "headers": headers}, client.receive, client.send))
    assert client.status == status


def test_without_a_key_every_door_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOET_API_KEY", raising=False)
    client = Client()
    asyncio.run(access.ApiKey(plain_app)(HTTP, client.receive, client.send))
    assert client.status == 200
