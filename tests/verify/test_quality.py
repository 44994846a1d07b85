"""Marking, with models that answer as the test wants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from moet.base.errors import UsageError
from moet.demo import tasks
from moet.verify import quality


class Pupil:
    """Knows the answers to everything, or to nothing."""

    def __init__(self, knows: bool, log_prob: float = -0.5) -> None:
        self.answers = {
            str(sample.messages): sample.answer
            for kind in tasks.KINDS
            for sample in tasks.heldout(kind, 12, 3)
        }
        self.knows = knows
        self.log_prob = log_prob
        self.limits: set[int] = set()

    def reply(self, messages: Sequence[Any], tools: Sequence[Any], max_tokens: int) -> str:
        self.limits.add(max_tokens)
        return self.answers[str(tuple(messages))] if self.knows else "I do not know."

    def log_probs(self, messages: Sequence[Any], answer: str) -> list[float]:
        return [self.log_prob] * (1 + len(answer) // 40)


def test_all_right() -> None:
    seen: list[tuple[str, float]] = []
    result = quality.measure(
        Pupil(True),
        "pupil",
        each=12,
        seed=3,
        aims=quality.AIMS,
        progress=lambda kind, share: seen.append((kind, share)),
    )
    assert all(score.share == 1.0 for score in result.scores if score.asked)
    assert result.missed == ()
    assert result.perplexity == pytest.approx(math.exp(0.5))
    assert list(dict.fromkeys(kind for kind, _ in seen)) == list(tasks.KINDS)
    assert [share for _, share in seen] == sorted(share for _, share in seen)
    assert seen[0][1] == 0.0


def test_all_wrong_misses_every_aim() -> None:
    result = quality.measure(Pupil(False), "pupil", each=12, seed=3, aims=quality.AIMS)
    assert all(score.right == 0 for score in result.scores)
    assert set(result.missed) == set(quality.AIMS)


def test_depths_of_recall_add_up() -> None:
    result = quality.measure(Pupil(True), "pupil", kinds=["recall"], each=12, seed=3)
    whole, *parts = result.scores
    assert [part.name for part in parts] == [
        "recall 0-25%",
        "recall 25-50%",
        "recall 50-75%",
        "recall 75-100%",
    ]
    assert sum(part.asked for part in parts) == whole.asked == 12
    assert result.perplexity is None


def test_aims_of_what_was_not_asked_are_not_missed() -> None:
    result = quality.measure(Pupil(True), "p", kinds=["text"], each=2, seed=3, aims=quality.AIMS)
    assert (result.missed, result.scores) == ((), ())


def test_json_of_a_result() -> None:
    result = quality.measure(Pupil(True), "pupil", kinds=["json", "text"], each=12, seed=3)
    data = result.as_dict()
    assert data["scores"]["json validity"] == {
        "name": "json validity",
        "right": 12,
        "asked": 12,
        "share": 1.0,
    }
    assert data["model"] == "pupil"


@pytest.mark.parametrize("log_prob", [-1e6, -math.inf, math.nan])
def test_a_perplexity_that_is_no_number(log_prob: float) -> None:
    result = quality.measure(Pupil(True, log_prob), "pupil", kinds=["text"], each=1, seed=3)
    assert result.perplexity == math.inf


@pytest.mark.parametrize(
    ("kinds", "each"),
    [(["poems"], 1), (["text"], 0), (["text"], -1), (["text"], 10**9), ([], 1), (["text"] * 2, 1)],
)
def test_bad_questions_are_refused(kinds: list[str], each: int) -> None:
    with pytest.raises(UsageError) as error:
        quality.measure(Pupil(True), "pupil", kinds=kinds, each=each)
    assert error.value.hint
