"""How well a served model does the tasks of `moet.demo`: sums, recall, JSON, perplexity.

The questions are held out by construction (`demo.tasks`), the marks are its `correct`. Greedy
decoding, so the same model on the same arithmetic always gets the same score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from moet.base.errors import UsageError
from moet.demo import tasks
from moet.demo.tasks import Sample

AIMS = {"addition": 0.95, "recall": 0.95, "json validity": 0.98}
"""What moet-tiny is made to reach; of other models nothing is expected."""

AT_ONCE = 8
MOST_EACH = 100_000
MOST_NATS = 700.0  # exp() of more is no number
DEPTHS = 4  # equal parts of a context, by where the wanted record stands
MAX_TOKENS = {"json": 256, "recall": 64, "text": 1}
ORDINARY_TOKENS = 48

Progress = Callable[[str, float], None]
"""Told the kind that is being asked and the share done, 0 to 1."""


class Answerer(Protocol):
    """A model that answers chats greedily. Called from several threads at once."""

    def reply(self, messages: Sequence[Any], tools: Sequence[Any], max_tokens: int) -> str:
        """The text of the answer; a tool call as ``<tool_call>{...}</tool_call>``."""
        ...

    def log_probs(self, messages: Sequence[Any], answer: str) -> list[float]:
        """Natural log-probabilities of the tokens of ``answer``, given the chat before it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Score:
    """One figure.

    Attributes:
        name: what was asked: a kind, ``recall 0-25%``, ``json validity``.
        right: answers that are right.
        asked: questions.
    """

    name: str
    right: int
    asked: int

    @property
    def share(self) -> float:
        """Part that is right; 0 when nothing was asked."""
        return self.right / self.asked if self.asked else 0.0


@dataclass(frozen=True, kw_only=True)
class Quality:
    """All figures of one model.

    Attributes:
        model: its name.
        seed: of the questions.
        scores: in the order in which they were asked.
        perplexity: of held-out stories, a token; None: not measured.
        missed: aims that were not reached.
    """

    model: str
    seed: int
    scores: tuple[Score, ...]
    perplexity: float | None
    missed: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        scores = {s.name: asdict(s) | {"share": round(s.share, 4)} for s in self.scores}
        return asdict(self) | {"scores": scores, "missed": list(self.missed)}


def require_questions(kinds: Sequence[str], each: int) -> None:
    """Raises UsageError for a kind that there is not or that is there twice, and for no question
    at all or more than anybody would wait for."""
    hint = f"kinds are {', '.join(tasks.KINDS)}"
    if unknown := [kind for kind in kinds if kind not in tasks.KINDS]:
        raise UsageError(f"there is no kind {unknown[0]!r}", hint=hint)
    if not kinds or len(set(kinds)) != len(kinds):
        raise UsageError(f"each kind is named once, not {', '.join(kinds) or 'none'}", hint=hint)
    if not 1 <= each <= MOST_EACH:
        hint = f"ask 1 to {MOST_EACH}"
        raise UsageError(f"{each} questions a kind", hint=hint)


def measure(
    model: Answerer,
    name: str,
    *,
    kinds: Sequence[str] = tasks.KINDS,
    each: int = 100,
    seed: int = 0,
    aims: dict[str, float] | None = None,
    progress: Progress = lambda kind, share: None,
) -> Quality:
    """Asks ``each`` questions of every kind and marks the answers.

    Raises:
        UsageError: see ``require_questions``.
        EngineError: of the model that is asked.
    """
    require_questions(kinds, each)
    scores: list[Score] = []
    perplexity = None
    for turn, kind in enumerate(kinds):
        progress(kind, turn / len(kinds))
        samples = tasks.heldout(kind, each, seed)
        if kind == "text":
            perplexity = _perplexity(model, samples)
        else:
            replies = []
            for reply in _replies(model, samples):
                replies.append(reply)
                progress(kind, (turn + len(replies) / each) / len(kinds))
            scores += _marked(kind, samples, replies)
    share = {score.name: score.share for score in scores}
    missed = tuple(n for n, aim in (aims or {}).items() if n in share and share[n] < aim)
    return Quality(
        model=name, seed=seed, scores=tuple(scores), perplexity=perplexity, missed=missed
    )


def _replies(model: Answerer, samples: Sequence[Sample]) -> Iterator[str]:
    def ask(sample: Sample) -> str:
        limit = MAX_TOKENS.get(sample.kind, ORDINARY_TOKENS)
        return model.reply(sample.messages, sample.tools, limit)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        yield from threads.map(ask, samples)


def _marked(kind: str, samples: Sequence[Sample], replies: Sequence[str]) -> list[Score]:
    """The score of a kind, and the finer ones that it has."""
    marks = [tasks.correct(s, reply) for s, reply in zip(samples, replies, strict=True)]
    scores = [Score(name=kind, right=sum(marks), asked=len(marks))]
    if kind == "json":
        valid = [tasks.valid_json(reply) for reply in replies]
        scores.append(Score(name="json validity", right=sum(valid), asked=len(valid)))
    if kind == "recall":
        for part in range(DEPTHS):
            inside = [
                mark
                for sample, mark in zip(samples, marks, strict=True)
                if int(sample.facts["depth"] * DEPTHS) == part
            ]
            name = f"recall {part * 100 // DEPTHS}-{(part + 1) * 100 // DEPTHS}%"
            scores.append(Score(name=name, right=sum(inside), asked=len(inside)))
    return scores


def _perplexity(model: Answerer, samples: Sequence[Sample]) -> float:
    """exp of the mean negative log-probability of a token, over all answers together; infinite
    where that is no number."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        pieces = list(threads.map(lambda s: model.log_probs(s.messages, s.answer), samples))
    values = [value for piece in pieces for value in piece]
    mean = -math.fsum(values) / len(values) if values else math.nan
    return math.exp(mean) if mean < MOST_NATS else math.inf
