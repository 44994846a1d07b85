"""`moet serve` in a process of its own, for measurements of the whole."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from moet.base import env
from moet.base.errors import EngineError

SERVE = (sys.executable, "-m", "moet", "serve")
STOP_SECONDS = 60.0
REQUEST_SECONDS = 1800.0
TOLD_LINES = 4


class Serving:
    """A server of a checkpoint, on a free port, with a key that nobody else has. Use in a ``with``.

    Args:
        folder: the checkpoint.
        flags: more arguments for ``moet serve``.
        command: what to start instead of it; folder and flags follow.
    """

    def __init__(
        self, folder: Path, flags: Sequence[str] = (), command: Sequence[str] | None = None
    ) -> None:
        self._key = secrets.token_urlsafe(24)
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in __exit__)
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            [*(command or SERVE), str(folder), "--json", "--port", "0", *flags],
            env=env.child_environ(MOET_API_KEY=self._key),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        self._url = self._model = ""

    @property
    def pid(self) -> int:
        """The process that all others of the server descend from."""
        return self._process.pid

    def wait(self) -> float:
        """Until it is ready; the seconds that it took.

        Raises:
            EngineError: it did not start; what it said is in the message.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(STOP_SECONDS)
            raise EngineError(f"the server did not start: {self._last_words()}")
        facts = json.loads(line)
        self._url, self._model = str(facts["url"]), str(facts["model"])
        return time.monotonic() - self._began

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().strip().splitlines()[-TOLD_LINES:]
        return " / ".join(lines) or f"exit {self._process.returncode}"

    def complete(self, prompt: Sequence[int], tokens: int) -> str:
        """Greedy continuation of a prompt of token ids by exactly ``tokens``. From any thread.

        Raises:
            EngineError: the server refuses, or is gone.
        """
        body = {"model": self._model, "prompt": list(prompt), "max_tokens": tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        try:
            answer = httpx.post(
                f"{self._url}/v1/completions",
                json=body,
                headers={"authorization": f"Bearer {self._key}"},
                timeout=httpx.Timeout(REQUEST_SECONDS, connect=5.0),
                trust_env=False,
            )
        except httpx.HTTPError as error:
            raise EngineError(f"the server gives no answer: {error}") from error
        if answer.status_code != httpx.codes.OK:
            raise EngineError(f"the server answers {answer.status_code}: {answer.text[:300]}")
        return str(answer.json()["choices"][0]["text"])

    def stop(self) -> None:
        """Ends it as ctrl-C does; by force when that takes too long."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._said.close()
