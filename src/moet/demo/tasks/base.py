"""What a task is made of: turns, samples, and the one rule that keeps held-out apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any
from zlib import crc32

Message = dict[str, Any]
Tool = dict[str, Any]
HELD_OUT_ONE_IN = 16


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One exchange. `identity` names the problem itself, whatever its wording."""

    user: str
    answer: str
    identity: str
    tool_result: str | None = None
    follow_up: str | None = None
    prompt_weight: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A held-out question: chat messages ending with the user's, and the right reply."""

    kind: str
    messages: tuple[Message, ...]
    answer: str
    tools: tuple[Tool, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


Maker = Callable[[Random], Turn]


def held_out(identity: str) -> bool:
    """Problems are split by what they ask, not by seed: training never sees these."""
    return crc32(identity.encode()) % HELD_OUT_ONE_IN == 0


def draw(make: Maker, rng: Random, *, held: bool) -> Turn:
    """The next turn on the wanted side of the split."""
    while True:
        turn = make(rng)
        if held_out(turn.identity) == held:
            return turn


def stream(kind: str, seed: int) -> Random:
    """One generator a kind and seed; the same on every machine."""
    return Random(f"moet-tiny/{kind}/{seed}")
