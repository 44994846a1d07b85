"""Held-out tasks for moet-tiny: `heldout(kind, n, seed)` asks, `correct(sample, reply)` marks.

Pure standard library, the same on every machine. What is held out is decided by the problem and
not by the seed (`base.held_out`), so no seed can meet a problem that training has seen.
"""

from __future__ import annotations

from random import Random

from moet.demo.tasks import arithmetic, recall, stories, tools
from moet.demo.tasks.base import Message, Sample, Turn, draw, held_out, stream
from moet.demo.tasks.grade import correct, parse_json, valid_json

__all__ = ["KINDS", "Message", "Sample", "correct", "heldout", "parse_json", "valid_json"]

KINDS = ("addition", "subtraction", "multiplication", "recall", "json", "text")
SUMS = {
    "addition": arithmetic.addition,
    "subtraction": arithmetic.subtraction,
    "multiplication": arithmetic.multiplication,
}
RECALL_TOKENS = (100, 3550)
TRIES = 64


def sample(kind: str, turn: Turn) -> Sample:
    """A one-turn sample without tools."""
    return Sample(kind=kind, messages=({"role": "user", "content": turn.user},), answer=turn.answer)


def held_out_question(rng: Random, whole: recall.Table) -> tuple[int, Turn] | None:
    """A record and a wording on the held-out side of the split, if a few tries find one."""
    for _ in range(TRIES):
        index = rng.randrange(len(whole.records))
        turn = recall.first(rng, whole, index)
        if held_out(turn.identity):
            return index, turn
    return None


def recall_sample(rng: Random) -> Sample:
    """A table of any length up to the context, asked about at any depth."""
    size = rng.randint(*RECALL_TOKENS)
    while True:
        whole = recall.table(rng, size)
        if found := held_out_question(rng, whole):
            break
    index, turn = found
    value = whole.records[index][1]
    facts = {"value": value, "records": len(whole.records), "depth": index / len(whole.records)}
    message = {"role": "user", "content": turn.user}
    return Sample(kind="recall", messages=(message,), answer=turn.answer, facts=facts)


def json_sample(rng: Random) -> Sample:
    """Half plain JSON on request, half a tool call."""
    if rng.random() < 0.5:
        make = tools.write_object if rng.random() < 0.7 else tools.write_list
        return sample("json", draw(make, rng, held=True))
    while True:
        offered = tools.offer(rng)
        turn = tools.invoke(rng, rng.choice(offered))
        if held_out(turn.identity):
            break
    message = {"role": "user", "content": turn.user}
    return Sample(kind="json", messages=(message,), answer=turn.answer, tools=offered)


def one(kind: str, rng: Random) -> Sample:
    """One held-out sample of a kind."""
    if kind in SUMS:
        return sample(kind, draw(SUMS[kind], rng, held=True))
    if kind == "recall":
        return recall_sample(rng)
    if kind == "json":
        return json_sample(rng)
    if kind == "text":
        return sample(kind, draw(stories.story, rng, held=True))
    raise ValueError(f"unknown kind {kind!r}; one of {', '.join(KINDS)}")


def heldout(kind: str, n: int, seed: int = 0) -> list[Sample]:
    """`n` samples of one of KINDS.

    addition, subtraction, multiplication: a question; `correct` marks the last number.
    recall: one to several hundred records; facts hold value, records and depth (0 = first).
    json: an object, a list or a tool call (then `tools` is set); marked by value.
    text: a request and a story: score the answer's perplexity given the messages.
    """
    rng = stream(kind, seed)
    return [one(kind, rng) for _ in range(n)]
