"""The comparison of answers that hybrid_transformers.py records: nothing that differs is missed."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install moet[cpu]")
pytest.importorskip("transformers", reason="transformers is not installed: pip install moet[cpu]")

from moet.demo import tasks
from moet.engine.transformers_greedy import Answer

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about itself

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("HF_HUB_OFFLINE", "CUBLAS_WORKSPACE_CONFIG", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # the script sets them for itself alone
    import hybrid_transformers

    return hybrid_transformers


SAID = [Answer((1, 2, 3), (-0.5, -0.25, -1.0)), Answer((4, 5, 6), (0.0, -2.0, -3.0))]


def test_equal_answers_are_equal(bench: ModuleType) -> None:
    row = bench.compare(SAID, list(SAID))
    assert row == {
        "tokens": 6,
        "tokens_that_differ": 0,
        "logprobs_that_differ": 0,
        "logprob_distance_max": 0.0,
    }
    assert bench.wrong([row]) == []


def test_one_bit_of_a_logprob_is_a_difference(bench: ModuleType) -> None:
    value = math.nextafter(-3.0, 0.0)
    row = bench.compare(SAID, [SAID[0], Answer((4, 5, 6), (0.0, -2.0, value))])
    assert (row["tokens_that_differ"], row["logprobs_that_differ"]) == (0, 1)
    assert row["logprob_distance_max"] == value + 3.0
    assert bench.wrong([row]) == [row]


def test_another_token_and_nan_are_differences(bench: ModuleType) -> None:
    row = bench.compare(SAID, [Answer((1, 9, 3), (-0.5, -0.25, math.nan)), SAID[1]])
    assert (row["tokens_that_differ"], row["logprobs_that_differ"]) == (1, 1)
    assert bench.wrong([row, {"kind": "other"}]) == [row]


def test_prompts_are_of_every_kind(bench: ModuleType) -> None:
    drawn = bench.samples_of(16)
    assert len(drawn) == 16
    assert {sample.kind for sample in drawn[: len(tasks.KINDS)]} == set(tasks.KINDS)
