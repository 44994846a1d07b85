"""Sums, differences and products. The reply restates the problem, then solves it."""

from __future__ import annotations

from random import Random

from moet.demo.tasks.base import Turn
from moet.demo.tasks.words import FOODS, NAMES, pick

ASK_ADD = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} = ?",
    "{a}+{b}=",
    "Add {a} and {b}.",
    "Compute {a} + {b}.",
    "Calculate {a} plus {b}.",
    "How much is {a} + {b}?",
    "What's {a} + {b}?",
    "what's {a}+{b}",
    "Can you add {a} and {b}?",
    "{a} plus {b}?",
    "What is the sum of {a} and {b}?",
    "Please add {a} to {b}.",
    "{n} has {a} {f} and gets {b} more. How many {f} does {n} have now?",
    "There are {a} {f} in one box and {b} in another. How many {f} are there?",
)
ASK_SUB = (
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "What's {a} - {b}?",
    "{a} minus {b}?",
    "{a} - {b}",
    "{a}-{b}",
    "{a} - {b} = ?",
    "Subtract {b} from {a}.",
    "Compute {a} - {b}.",
    "How much is {a} minus {b}?",
    "What is the difference between {a} and {b}?",
    "{n} has {a} {f} and gives away {b}. How many {f} are left?",
)
ASK_MUL = (
    "What is {a} * {b}?",
    "What is {a} times {b}?",
    "{a} * {b}",
    "{a} x {b}",
    "Multiply {a} by {b}.",
    "How much is {a} times {b}?",
    "{n} has {a} boxes with {b} {f} each. How many {f} is that?",
)


BEFORE = ("Hi! ", "Hello, ", "Please: ", "Good morning! ", "Now ", "And ", "OK, ", "Tell me: ")


def number(rng: Random, digits: int) -> int:
    """Uniform among the numbers with that many digits (0 counts as one digit)."""
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def ask(rng: Random, forms: tuple[str, ...], a: int, b: int) -> str:
    """One wording of the question."""
    text = rng.choice(forms).format(a=a, b=b, n=pick(rng, NAMES), f=rng.choice(FOODS))
    return rng.choice(BEFORE) + text if rng.random() < 0.1 else text


def addition(rng: Random) -> Turn:
    """One to three digits each. Both single-digit is the times table of sums: never held out."""
    a, b = number(rng, rng.randint(1, 3)), number(rng, rng.randint(1, 3))
    low, high = sorted((a, b))
    identity = f"add {low} {high}" if high > 9 else "add digits"
    return Turn(user=ask(rng, ASK_ADD, a, b), answer=f"{a} + {b} = {a + b}", identity=identity)


def subtraction(rng: Random) -> Turn:
    """One to three digits, never below zero."""
    b, a = sorted((number(rng, rng.randint(1, 3)), number(rng, rng.randint(1, 3))))
    identity = f"sub {a} {b}" if a > 9 else "sub digits"
    return Turn(user=ask(rng, ASK_SUB, a, b), answer=f"{a} - {b} = {a - b}", identity=identity)


def multiplication(rng: Random) -> Turn:
    """A digit times one or two digits, in either order, and the table up to twelve."""
    a, b = number(rng, 1), number(rng, rng.randint(1, 2))
    if rng.random() < 0.3:
        a, b = rng.randint(0, 12), rng.randint(0, 12)
    elif rng.random() < 0.5:
        a, b = b, a
    low, high = sorted((a, b))
    identity = f"mul {low} {high}" if high > 12 else "mul table"
    return Turn(
        user=ask(rng, ASK_MUL, a, b), answer=f"{a} * {b} = {working(a, b)}", identity=identity
    )


def working(a: int, b: int) -> str:
    """The product; above the table, tens and ones on the way: 87 * 8 = 640 + 56 = 696."""
    digit, other = sorted((a, b))
    if other <= 12:
        return str(a * b)
    tens, ones = other // 10 * 10 * digit, other % 10 * digit
    return f"{tens} + {ones} = {a * b}"


def compare(rng: Random) -> Turn:
    """Which of two numbers is larger."""
    a, b = number(rng, rng.randint(1, 3)), number(rng, rng.randint(1, 3))
    form = rng.choice(("Which is larger, {a} or {b}?", "Is {a} more than {b}?"))
    if form.startswith("Which"):
        answer = f"{max(a, b)} is larger." if a != b else "They are equal."
    else:
        answer = f"Yes, {a} is more than {b}." if a > b else f"No, {a} is not more than {b}."
    return Turn(user=form.format(a=a, b=b), answer=answer, identity=f"compare {a} {b}")
