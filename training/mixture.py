"""Training rows: whole conversations of one length, every task in turn, nothing held out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from moet.demo.tasks import arithmetic, code, memory, recall, stories, talk, tools
from moet.demo.tasks.base import Maker, Turn, draw, held_out
from training.chat import Segment, ask, reply, system

TURNS: dict[Maker, int] = {
    arithmetic.addition: 30,
    arithmetic.subtraction: 12,
    arithmetic.multiplication: 12,
    arithmetic.compare: 4,
    tools.write_object: 9,
    tools.write_list: 4,
    stories.story: 8,
    stories.question: 7,
    talk.chat: 10,
    talk.fact: 3,
    talk.unknown: 5,
    talk.repeat: 5,
    talk.count: 3,
    code.function: 7,
}
LOOSE = (
    arithmetic.addition,
    arithmetic.subtraction,
    arithmetic.multiplication,
    stories.story,
    code.function,
)
SYSTEMS = (
    "You are moet-tiny.",
    "You are moet-tiny, a helpful assistant.",
    "You are a helpful assistant.",
    "Be brief.",
    "Answer in plain English.",
)
SHARES = {"short": (40, 42, 18), "long": (75, 15, 10)}  # recall, chat, tools
LONG = 2048


def exchange(turn: Turn) -> list[Segment]:
    """A turn as segments, with the tool's result and what is said of it."""
    out = ask("user", turn.user, round(100 * turn.prompt_weight)) + reply(turn.answer)
    if turn.tool_result is not None and turn.follow_up is not None:
        out += ask("tool", turn.tool_result, 0) + reply(turn.follow_up)
    return out


def any_turn(rng: Random) -> list[Segment]:
    """One turn of the everyday mixture, one in ten typed loosely."""
    make = rng.choices(list(TURNS), list(TURNS.values()))[0]
    turn = draw(make, rng, held=False)
    if make in LOOSE and rng.random() < 0.1:
        turn = replace(turn, user=talk.loosen(rng, turn.user))
    return exchange(turn)


def memory_turn(rng: Random, known: dict[str, str]) -> list[Segment]:
    """The user tells a fact, or asks for one told before (or never told)."""
    if rng.random() < 0.4 or not known:
        key, value = memory.fact(rng)
        if rng.random() < 0.15 and key not in known:
            return exchange(memory.unsaid(rng, key))
        known[key] = value
        return exchange(memory.tell(rng, (key, value)))
    key = rng.choice(list(known))
    return exchange(memory.ask(rng, (key, known[key])))


def opening(rng: Random) -> list[Segment]:
    """A system message in three of ten conversations."""
    return system(rng.choice(SYSTEMS) if rng.random() < 0.3 else None, ())


def chat_row(rng: Random, length: int) -> Iterator[list[Segment]]:
    """Everyday turns without end, one in ten about facts the user has told."""
    yield opening(rng)
    known: dict[str, str] = {}
    while True:
        yield memory_turn(rng, known) if rng.random() < 0.1 else any_turn(rng)


def tools_row(rng: Random, length: int) -> Iterator[list[Segment]]:
    """A few tools on offer; two turns of three need one of them."""
    offered = tools.offer(rng)
    yield system(rng.choice(SYSTEMS) if rng.random() < 0.3 else None, offered)
    while True:
        if rng.random() < 0.67:
            turn = draw(lambda r: tools.invoke(r, r.choice(offered)), rng, held=False)
            yield exchange(turn)
        else:
            yield any_turn(rng)


def recall_row(rng: Random, length: int) -> Iterator[list[Segment]]:
    """A table that fills a third to nearly all of the row, then question upon question."""
    yield opening(rng)
    while rng.random() < 0.15:
        yield any_turn(rng)
    whole = recall.table(rng, round(length * rng.uniform(0.3, 0.9)))
    turn = recall.first(rng, whole, rng.randrange(len(whole.records)))
    if not held_out(turn.identity):
        yield exchange(turn)
        while True:
            yield exchange(recall.again(rng, whole)) if rng.random() < 0.9 else any_turn(rng)
    yield from chat_row(rng, length)


def conversation(rng: Random, length: int) -> Iterator[list[Segment]]:
    """An endless conversation fit for a row of `length` tokens."""
    shares = SHARES["long" if length >= LONG else "short"]
    kind = rng.choices((recall_row, chat_row, tools_row), shares)[0]
    return kind(rng, length)
