"""Key-value recall: many records, then questions about them, over the whole context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from re import compile as pattern
from string import ascii_lowercase

from moet.demo.tasks.base import Turn
from moet.demo.tasks.stories import sentence
from moet.demo.tasks.words import ADJECTIVES, COLORS, FOODS, NAMES, NOUNS, pick, rare

LINES = (
    "{k}: {v}",
    "{k} = {v}",
    "{k} -> {v}",
    "- {k}: {v}",
    "The code for {k} is {v}.",
    "{k} has the number {v}.",
    "The secret of {k} is {v}.",
)
INTROS = (
    "Here is a list:",
    "Remember this:",
    "Read these records.",
    "Here are some notes:",
    "This is my table.",
    "Please keep this in mind:",
)
ASKS = (
    "What goes with {k}?",
    "What do you have for {k}?",
    "Look up {k}.",
    "Find {k}.",
    "What is the record of {k}?",
    "{k}?",
    "And {k}?",
    "Tell me what is noted for {k}.",
    "What is {k}?",
    "What is the code for {k}?",
)


MADE_UP = 2
PIECE = pattern(r"\d|[a-zA-Z]+|[^\w\s]|\n")


@dataclass(frozen=True)
class Table:
    """Records in one line style; `noise` is the share of story sentences between them."""

    line: str
    records: tuple[tuple[str, str], ...]
    text: str

    def question(self, rng: Random, index: int) -> str:
        """One wording of the question after record `index`."""
        return rng.choice(ASKS).format(k=self.records[index][0])

    def reply(self, index: int) -> str:
        """The record itself, as it stood in the table."""
        key, value = self.records[index]
        return self.line.removeprefix("- ").format(k=key, v=value)


def key(rng: Random, style: int) -> str:
    """Two words, a name with a number, or a made-up code."""
    if style == 0:
        return f"{rng.choice(ADJECTIVES)} {pick(rng, NOUNS, odd=0.05)}"
    if style == 1:
        return f"{pick(rng, NAMES)} {rng.randrange(10, 100)}"
    return "".join(rng.choices(ascii_lowercase, k=4)) if rng.random() < 0.5 else rare(rng)


def value(rng: Random, style: int) -> str:
    """A number of two to four digits, or a word, at times a rare one."""
    if style == 0:
        return str(rng.randrange(10, 10_000))
    if style == 1:
        return str(rng.randrange(100, 1000))
    return pick(rng, rng.choice((COLORS, FOODS, NOUNS)))


def pairs(rng: Random, style: int) -> Iterator[tuple[str, str]]:
    """Endless records with distinct keys in one style and values in another."""
    values = rng.choice((0, 1, 1, 2))
    seen: set[str] = set()
    while True:
        k = key(rng, style)
        if k not in seen:
            seen.add(k)
            yield k, value(rng, values)


def tokens(text: str, style: int) -> int:
    """About how many tokens a line and its end take; names and made-up codes are several."""
    return len(PIECE.findall(text)) + 2 + style


def table(rng: Random, size: int) -> Table:
    """Records until the text is about `size` tokens; a third of the tables hide them in prose."""
    line, style = rng.choice(LINES), rng.choice((0, 0, 0, 1, MADE_UP))
    source = pairs(rng, style)
    noise = rng.choice((0.0, 0.0, rng.uniform(0.2, 0.9)))
    records: list[tuple[str, str]] = []
    parts: list[str] = [rng.choice(INTROS)]
    used = 0
    while used < size or not records:
        if noise and rng.random() < noise:
            parts.append(sentence(rng))
        else:
            records.append(next(source))
            parts.append(line.format(k=records[-1][0], v=records[-1][1]))
        used += tokens(parts[-1], style)
    return Table(line, tuple(records), "\n".join(parts))


def first(rng: Random, whole: Table, index: int) -> Turn:
    """The opening turn: the table and a question about one record."""
    user = f"{whole.text}\n\n{whole.question(rng, index)}"
    return Turn(user=user, answer=whole.reply(index), identity=user, prompt_weight=0.0)


def again(rng: Random, whole: Table) -> Turn:
    """A later turn about a record of a table given before."""
    index = rng.randrange(len(whole.records))
    user = whole.question(rng, index)
    return Turn(user=user, answer=whole.reply(index), identity=user)
