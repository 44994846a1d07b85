"""Short plain-English stories from a small grammar, and questions about them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from re import compile as pattern

from moet.demo.tasks.base import Turn
from moet.demo.tasks.words import ANIMALS, COLORS, FOODS, NAMES, PLACES, THINGS, TRAITS, pick

OPEN = (
    "Once there was a {t} {a} named {n} who lived near the {p}.",
    "{n} was a {t} {a}. {n} lived by the {p}.",
    "In a {p} far away there lived a {t} {a} called {n}.",
    "Long ago, a {t} {a} named {n} had a home at the {p}.",
)
FIND = (
    "One morning {n} found a {c} {o} under a tree.",
    "One day {n} saw a {c} {o} in the grass.",
    "After the rain, a {c} {o} lay on the path.",
    "{n} was eating {f} when a {c} {o} fell from the sky.",
)
TROUBLE = (
    '"Who lost this {o}?" asked {n}.',
    "{n} did not know who had lost the {o}.",
    'It was too heavy for {n}. "I need a friend," said {n}.',
    "But it began to snow, and {n} could not see the way home.",
)
HELP = (
    'Then {m} the {b} came by and said, "Let us go to the {q}."',
    "{m}, a {u} {b}, heard this and came to help.",
    "So {n} walked to the {q} and met {m}, a {u} {b}.",
    'At the {q} a {b} was waiting. "My name is {m}," said the {b}.',
)
DEED = (
    "Together they carried the {o} all the way to the {q}.",
    "They asked everyone in the {q}, and at last they found the owner.",
    "{m} held the {o}, and {n} showed the way.",
    "The two of them shared some {f} and thought about it.",
)
END = (
    "From that day on {n} and {m} were the best of friends.",
    'They laughed and went home. "What a day!" said {n}.',
    "That night {n} slept well, and so did {m}.",
    "And every year they met again at the {p} to eat {f}.",
)
FILLER = (
    "The {t} {a} sat by the {p}.",
    "{n} likes the {c} {o}.",
    "A {b} was looking for {f} near the {q}.",
    "It was a cold day at the {p}, and {n} stayed at home.",
    "{m} gave {n} a {o}.",
    "The {c} {o} was in the {q} all day.",
)
ASKS = (
    "Tell me a story about a {a} and a {o}.",
    "Tell me a story about a {a}.",
    "Tell me a story.",
    "Please tell me a short story about {n}.",
    "Write a story about a {t} {a} named {n}.",
    "I would like to hear a story about a {o}.",
    "Write a short story.",
    "Can you tell a story about a {a} in a {p}?",
    "Tell me a story about {n} and {m}.",
    "Tell me about the {a} and the {o}.",
    "A story about a {c} {o}, please.",
    "Another story.",
)


VOWEL = pattern(r"\b([Aa]) (?=[aeiou])")


@dataclass(frozen=True)
class Cast:
    """Who and what a story is about."""

    slots: dict[str, str]

    def say(self, form: str) -> str:
        """One line of the grammar, with an before a vowel."""
        return VOWEL.sub(r"\1n ", form.format_map(self.slots))


def cast(rng: Random) -> Cast:
    """Two friends, two places, one thing, one food."""
    n, m = (pick(rng, [name], odd=0.1) for name in rng.sample(NAMES, 2))
    a, b = (pick(rng, [animal], odd=0.05) for animal in rng.sample(ANIMALS, 2))
    p, q = rng.sample(PLACES, 2)
    t, u = rng.sample(TRAITS, 2)
    c, o, f = rng.choice(COLORS), pick(rng, THINGS, odd=0.05), rng.choice(FOODS)
    slots = {"n": n, "m": m, "a": a, "b": b, "p": p, "q": q, "t": t, "u": u, "c": c, "o": o}
    return Cast(slots | {"f": f})


def tell(rng: Random, who: Cast) -> str:
    """Six beats; the middle ones may be left out or doubled by their neighbour."""
    beats = [OPEN, FIND, TROUBLE, HELP, DEED, END]
    if rng.random() < 0.3:
        del beats[rng.choice((2, 4))]
    return " ".join(who.say(rng.choice(beat)) for beat in beats)


def sentence(rng: Random) -> str:
    """One sentence of prose, for haystacks."""
    return cast(rng).say(rng.choice(FILLER))


def story(rng: Random) -> Turn:
    """A request and the story told. The wording of the request binds what it names."""
    who = cast(rng)
    text = tell(rng, who)
    return Turn(user=who.say(rng.choice(ASKS)), answer=text, identity=text)


def question(rng: Random) -> Turn:
    """A story in the user's message and a question that its words answer."""
    who = cast(rng)
    text = who.say(rng.choice(OPEN)) + " " + who.say("One day {n} found a {c} {o}.")
    ask, answer = rng.choice(
        (
            ("What did {n} find?", "{n} found a {c} {o}."),
            ("Who found the {o}?", "{n} found the {o}."),
            ("What color was the {o}?", "The {o} was {c}."),
            ("Where did {n} live?", "{n} lived at the {p}."),
            ("What kind of animal is {n}?", "{n} is a {t} {a}."),
        )
    )
    user = f"{text} {who.say(ask)}"
    return Turn(user=user, answer=who.say(answer), identity=user)
