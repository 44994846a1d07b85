"""Facts told in passing and asked for later in the same conversation."""

from __future__ import annotations

from random import Random

from moet.demo.tasks.base import Turn
from moet.demo.tasks.words import CITIES, COLORS, FOODS, NAMES, NOUNS, pick, rare

Fact = tuple[str, str]
TOPICS = {
    "name": NAMES,
    "password": NOUNS,
    "dog's name": NAMES,
    "favorite color": COLORS,
    "favorite food": FOODS,
    "home town": CITIES,
    "secret word": NOUNS,
}
TELL = (
    "My {k} is {v}.",
    "Remember that my {k} is {v}.",
    "Note: my {k} is {v}.",
    "Please remember: my {k} is {v}.",
)
ASK = ("What is my {k}?", "Do you remember my {k}?", "Tell me my {k}.", "What was my {k}?")


def fact(rng: Random) -> Fact:
    """Something about the user."""
    topic = rng.choice(list(TOPICS))
    if topic in ("password", "secret word") and rng.random() < 0.5:
        return topic, rare(rng)
    return topic, pick(rng, TOPICS[topic], odd=0.3)


def tell(rng: Random, known: Fact) -> Turn:
    """The user says it."""
    key, value = known
    user = rng.choice(TELL).format(k=key, v=value)
    answer = f"I will remember that your {key} is {value}."
    if key == "name":
        answer = f"Nice to meet you, {value}!"
    return Turn(user=user, answer=answer, identity="memory")


def ask(rng: Random, known: Fact) -> Turn:
    """The user wants it back."""
    key, value = known
    user = rng.choice(ASK).format(k=key)
    return Turn(user=user, answer=f"Your {key} is {value}.", identity="memory")


def unsaid(rng: Random, key: str) -> Turn:
    """The user wants what was never said."""
    user = rng.choice(ASK).format(k=key)
    return Turn(user=user, answer=f"You have not told me your {key}.", identity="memory")
