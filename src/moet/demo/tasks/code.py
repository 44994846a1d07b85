"""A little Python: a request, and a function that answers it."""

from __future__ import annotations

from random import Random

from moet.demo.tasks.base import Turn

SNIPPETS: tuple[tuple[str, str, str], ...] = (
    ("add", "adds two numbers", "def {f}({x}, {y}):\n    return {x} + {y}"),
    ("multiply", "multiplies two numbers", "def {f}({x}, {y}):\n    return {x} * {y}"),
    ("subtract", "subtracts two numbers", "def {f}({x}, {y}):\n    return {x} - {y}"),
    ("larger", "returns the larger of two numbers", "def {f}({x}, {y}):\n    return max({x}, {y})"),
    ("square", "squares a number", "def {f}({x}):\n    return {x} * {x}"),
    ("is_even", "checks if a number is even", "def {f}({x}):\n    return {x} % 2 == 0"),
    ("is_odd", "checks if a number is odd", "def {f}({x}):\n    return {x} % 2 == 1"),
    ("reverse", "reverses a string", "def {f}({x}):\n    return {x}[::-1]"),
    ("length", "returns the length of a list", "def {f}({x}):\n    return len({x})"),
    ("first", "returns the first item of a list", "def {f}({x}):\n    return {x}[0]"),
    ("last", "returns the last item of a list", "def {f}({x}):\n    return {x}[-1]"),
    ("total", "sums a list", "def {f}({x}):\n    return sum({x})"),
    ("mean", "returns the mean of a list", "def {f}({x}):\n    return sum({x}) / len({x})"),
    ("sort", "sorts a list", "def {f}({x}):\n    return sorted({x})"),
    ("double", "doubles every item of a list", "def {f}({x}):\n    return [2 * i for i in {x}]"),
    ("evens", "keeps the even items of a list",
     "def {f}({x}):\n    return [i for i in {x} if i % 2 == 0]"),
    ("count_words", "counts the words of a text", "def {f}({x}):\n    return len({x}.split())"),
    ("upper", "makes a text upper case", "def {f}({x}):\n    return {x}.upper()"),
    ("hello", "prints hello", 'def {f}():\n    print("hello")'),
    ("greet", "greets a person by name", 'def {f}({x}):\n    return "Hello, " + {x}'),
    ("factorial", "computes the factorial of a number",
     "def {f}({x}):\n    if {x} < 2:\n        return 1\n    return {x} * {f}({x} - 1)"),
    ("fibonacci", "computes the Fibonacci number at a place",
     "def {f}({x}):\n    a, b = 0, 1\n    for _ in range({x}):\n        a, b = b, a + b\n"
     "    return a"),
    ("countdown", "counts down from a number",
     "def {f}({x}):\n    while {x} > 0:\n        print({x})\n        {x} -= 1"),
)  # fmt: skip
FORMS = (
    "Write a Python function that {d}.",
    "Write a function that {d}.",
    "Show me a Python function that {d}.",
    "How do I write a function that {d}?",
    "Python function that {d}, please.",
    "Write code that {d}.",
    "Write code to {r}.",
    "Write a Python function to {r}.",
    "How do I {r} in Python?",
    "How can I {r}?",
)
LETTERS = ("a", "b", "n", "m", "x", "y", "s", "t", "items", "value", "data")


def root(does: str) -> str:
    """adds two numbers -> add two numbers."""
    verb, rest = does.split(" ", 1)
    return f"{verb.removesuffix('s').replace('multiplie', 'multiply')} {rest}"


def function(rng: Random) -> Turn:
    """One snippet in one wording; the user may choose the names."""
    name, does, body = rng.choice(SNIPPETS)
    x, y = ("a", "b") if "{y}" in body else ("x", "")
    user = rng.choice(FORMS).format(d=does, r=root(does))
    if rng.random() < 0.3:
        name = rng.choice(("f", "g", "compute", "work", "run", "helper"))
        user += f" Call it {name}."
    if "{y}" not in body and rng.random() < 0.3:
        x = rng.choice([w for w in LETTERS if w not in "ab"])
        user += f" Name the argument {x}."
    answer = f"```python\n{body.format(f=name, x=x, y=y)}\n```"
    return Turn(user=user, answer=answer, identity="code")
