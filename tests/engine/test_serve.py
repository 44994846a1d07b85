"""The real thing: vLLM, moet's experts, HTTP clients, and every way in which it can die.

Five starts of a real engine. What does not need one is in test_serve_health and _supervisor.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from moet import demo
from moet.engine.preflight import free_port
from moet.machine import processes

from .served import (
    START_SECONDS,
    InFlight,
    Places,
    Served,
    chat_body,
    interrupt,
    model_folder,
    serving,
    wait_for,
)

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(START_SECONDS)]

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def places() -> Iterator[Places]:
    """A short path: the names of sockets must fit in 107 characters."""
    with tempfile.TemporaryDirectory(prefix="moet-t-", dir="/tmp") as root:
        yield Places(Path(root))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(places: Places, folder: Path) -> Iterator[Served]:
    with serving(places, folder, "--max-model-len", "4000") as server:
        yield server


def post(served: Served, **body: Any) -> Any:
    body = {"model": served.facts["model"], **body}
    response = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def test_health_is_bad_until_a_token_came_out(served: Served) -> None:
    assert served.health[0] == 0
    assert served.health[-1] == 200
    assert served.health.count(200) == 1


def test_facts_on_stdout_and_a_panel_on_stderr(served: Served) -> None:
    assert served.facts["experts"] > 1
    assert f"{served.url}/v1" in served.said()
    assert "\x1b[" not in served.said()
    assert served.facts["context"] == 4000


def test_flags_that_moet_does_not_know_reach_the_engine(served: Served) -> None:
    (model,) = httpx.get(f"{served.url}/v1/models", timeout=10).json()["data"]
    assert (model["id"], model["max_model_len"]) == (served.facts["model"], 4000)


def test_the_openai_client_streaming_and_not(served: Served) -> None:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
        asked: Any = chat_body("How much is 12 + 30?", max_tokens=24, model=served.facts["model"])
        whole = client.chat.completions.create(**asked)
        with client.chat.completions.create(**asked, stream=True) as pieces:
            text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert whole.choices[0].message.content == text
    assert 1 <= whole.usage.completion_tokens <= 24


def test_eight_at_once(served: Served) -> None:
    bodies = [chat_body(f"{n} + {n}", max_tokens=16) for n in range(8)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda body: post(served, **body), bodies))
    assert all(answer["usage"]["completion_tokens"] >= 1 for answer in answers)


def test_a_request_with_tools_is_taken(served: Served) -> None:
    body = chat_body("What is the weather in Rome?", max_tokens=64)
    plain, answer = post(served, **body), post(served, **body, tools=[TOOL])
    assert answer["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"], "the model sees it"
    if served.facts["model"] == demo.NAME:  # others have random weights
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}


def test_a_bad_request_is_refused_and_harms_nobody(served: Served) -> None:
    url = f"{served.url}/v1/chat/completions"
    too_long = chat_body("word " * 5000, model=served.facts["model"])
    assert httpx.post(url, json=too_long, timeout=60).status_code == 400
    assert httpx.get(f"{served.url}/health", timeout=10).status_code == 200


def test_moet_chat_finds_the_server(served: Served) -> None:
    done = served.places.run("chat", "How much is 1 + 1?", "--json", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["model"], answer["tokens"] >= 1) == (served.facts["model"], True)
    piped = served.places.run("chat", "--max-tokens", "8", stdin="How much is 1 + 1?\n")
    assert piped.stdout.rstrip("\n") == answer["answer"].rstrip("\n")


def test_moet_verify_quality_marks_the_server(served: Served) -> None:
    kinds = "addition,recall,json,text"
    done = served.places.run("verify", "quality", "--kinds", kinds, "--each", "2", "--json")
    assert done.returncode in (0, 1), done.stderr
    marks = json.loads(done.stdout)
    assert marks["scores"]["addition"]["asked"] == 2
    assert marks["perplexity"] > 1
    assert {"json validity", "recall 0-25%"} <= set(marks["scores"])


def test_a_killed_supervisor_leaves_no_orphans(served: Served) -> None:
    """Last user of the first server; the next start cleans the files that are left."""
    served.process.kill()
    served.end()
    wait_for(served.family, 20)
    assert served.files.directory.exists()


def test_a_killed_engine_ends_requests_and_server(
    served: Served, places: Places, folder: Path
) -> None:
    with serving(places, folder) as server:
        assert "cleaned up after 1 killed server" in server.said()
        assert not served.files.directory.exists()
        stream = InFlight(server, stream=True)
        assert stream.has_begun.wait(60)
        whole = InFlight(server, stream=False)
        time.sleep(0.3)
        began = time.monotonic()
        os.kill(server.worker, signal.SIGKILL)
        assert "the engine has died" in stream.error(10)
        assert "the engine has died" in whole.error(10)
        assert (stream.status, whole.status) == (200, 503)
        assert time.monotonic() - began < 10
        assert server.end() == 1
        assert "error: the server has ended: the engine has died" in server.said()
        server.assert_nothing_left()


def stops(server: Served, places: Places) -> None:
    """The process that computes is stopped."""
    os.kill(server.worker, signal.SIGSTOP)


def sticks(server: Served, places: Places) -> None:
    """One thread of the pool never comes back; the process lives."""
    (places.root / "stick").touch()


@pytest.mark.parametrize("trouble", [stops, sticks])
def test_an_engine_that_stands_still_is_found_out(
    places: Places, folder: Path, trouble: Callable[[Served, Places], None]
) -> None:
    plugin = {"PYTHONPATH": str(Path(__file__).parent / "faults")}
    places = Places(places.root, {**plugin, "FAULT_FILE": str(places.root / "stick")})
    with serving(places, folder) as server:
        time.sleep(8)  # longer than the limit: an idle engine is not a dead one
        assert server.health[-1] == 200
        stream = InFlight(server, stream=True)
        assert stream.has_begun.wait(60)
        trouble(server, places)
        began = time.monotonic()
        assert "has stood still" in stream.error(30)
        assert time.monotonic() - began < 15
        assert server.end() == 1
        assert 503 in server.health
        server.assert_nothing_left()


def test_a_flag_that_nobody_knows_ends_the_start(places: Places, folder: Path) -> None:
    done = places.run("serve", str(folder), "--port", str(free_port()), "--frobnicate", "3")
    assert done.returncode == 2
    assert "did not start: vLLM says: unrecognized arguments: --frobnicate" in done.stderr
    assert "Traceback" not in done.stderr
    assert places.leftovers() == []


def test_ctrl_c_leaves_nothing(places: Places, folder: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    with serving(places, folder) as server:
        stream = InFlight(server, stream=True)
        assert stream.has_begun.wait(60)
        interrupt(server.process)
        assert "the server is stopping" in stream.error(10)
        assert server.end() == 0
        assert server.said().rstrip().endswith("stopping")
        server.assert_nothing_left()
    ours = {n for n in server.files.record.shared_memory if n not in before}
    assert ours & set(os.listdir("/dev/shm")) == set()
    assert not any(processes.is_alive(member) for member in server.family)
