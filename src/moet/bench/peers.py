"""Peers beside moet: each in a child process, asked for steps over a pipe, stopped when not asked.

Between its turns a child is stopped by a signal: the pools of some peers spin for a while after a
step, which would be measured as moet's time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any, TextIO

import numpy as np

from moet.base.errors import KernelError, UsageError
from moet.bench.peer_engines import ENGINES, Engine, Weights
from moet.bench.rig import Shape, random_work, random_x
from moet.bench.timing import Sample, timed
from moet.kernels.rounding import widen_bf16
from moet.machine.processes import die_with_parent

CHECKED_TOKENS = 2
SEED = 0

ERROR_LIMIT = 0.1
"""Relative error of a peer's output (against fp32 on the dequantised weights) above which it does
not compute the same layer, so that its speed says nothing."""


def installed() -> list[str]:
    """Names of the peers that can be imported here."""
    return [name for name, (module, _) in ENGINES.items() if find_spec(module) is not None]


class Peer:
    """A peer with the layer loaded, in a child process; a context manager.

    Args:
        name: one of `installed()`.
        shape: the layer.
        threads: of the peer's pool.
        max_tokens: tokens of the largest call.

    Raises:
        KernelError: it failed to start, with its own last words.
    """

    def __init__(self, name: str, shape: Shape, threads: int, max_tokens: int) -> None:
        setup = {
            "name": name,
            "shape": asdict(shape),
            "threads": threads,
            "max_tokens": max_tokens,
        }
        command = [sys.executable, "-m", "moet.bench.peers", json.dumps(setup)]
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the peer
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        self.name = name
        hello = self._answer()
        self.version: str = hello["version"]
        self.error: float = hello["error"]
        self._sleep()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.communicate()
        self._stderr.close()

    def samples(self, tokens: int, count: int) -> list[Sample]:
        """Runs and times `count` steps with new random experts each."""
        self._child.send_signal(signal.SIGCONT)
        if self._child.stdin is None:
            raise KernelError(f"{self.name} has no input pipe")
        with suppress(BrokenPipeError):  # it has ended: the answer says how
            self._child.stdin.write(json.dumps([tokens, count]) + "\n")
            self._child.stdin.flush()
        answer = self._answer()
        self._sleep()
        return [Sample(seconds, quiet) for seconds, quiet in answer["samples"]]

    def _sleep(self) -> None:
        self._child.send_signal(signal.SIGSTOP)

    def _answer(self) -> dict[str, Any]:
        line = self._child.stdout.readline() if self._child.stdout else ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._child.communicate()
        self._stderr.seek(0)
        last_words = self._stderr.read().strip().splitlines()[-1:]
        self._stderr.close()
        code = self._child.returncode
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        raise KernelError(
            f"{self.name} ended {how}: {last_words[0] if last_words else 'without a word'}",
            hint="leave it out: --peers none",
        )


def serve(setup: dict[str, Any], requests: TextIO, answers: TextIO) -> None:
    """The child: loads the layer, tells its version and error, answers [tokens, count] lines."""
    shape = Shape(**setup["shape"])
    weights = Weights.random(shape, SEED)
    max_tokens = max(setup["max_tokens"], CHECKED_TOKENS)
    engine = ENGINES[setup["name"]][1](shape, weights, setup["threads"], max_tokens)
    rng = np.random.default_rng(SEED)
    x = random_x(rng, max_tokens, shape.hidden)

    def answer(**values: object) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    answer(version=engine.version, error=relative_error(engine, weights, shape, rng))
    for line in requests:
        tokens, count = json.loads(line)
        engine.step(x[:tokens], random_work(rng, tokens, shape))()  # it has just been woken
        taken = []
        for _ in range(count):
            sample = timed(engine.step(x[:tokens], random_work(rng, tokens, shape)))
            taken.append((sample.seconds, sample.quiet))
        answer(samples=taken)


def relative_error(
    engine: Engine, weights: Weights, shape: Shape, rng: np.random.Generator
) -> float:
    """Error of a few tokens against fp32 on the dequantised weights, by norms."""
    x, work = random_x(rng, CHECKED_TOKENS, shape.hidden), random_work(rng, CHECKED_TOKENS, shape)
    engine.step(x, work)()
    want = weights.layer(widen_bf16(x), work)
    return float(np.linalg.norm(engine.output() - want) / np.linalg.norm(want))


def main() -> None:
    """Entry of the child. Its standard output is the pipe: peers that print there must not."""
    if len(sys.argv) != 2:
        raise UsageError("this module is run by moet.bench.peers.Peer")
    setup = json.loads(sys.argv[1])
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(setup, sys.stdin, answers)


if __name__ == "__main__":
    main()
