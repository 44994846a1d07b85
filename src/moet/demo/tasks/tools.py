"""JSON: objects and lists on request, and calls of the tools that the system message offers."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from moet.demo.tasks.base import Tool, Turn
from moet.demo.tasks.words import (
    CITIES,
    COLORS,
    DAYS,
    FOODS,
    NAMES,
    NOUNS,
    ROOMS,
    THINGS,
    TRAITS,
    pick,
    rare,
    words,
)

Call = tuple[str, dict[str, Any]]
FIELDS = words(
    "name age city color size count item day room food done title year level kind price weight "
    "height email topic author score active open"
)
TYPES = {str: "string", int: "integer", bool: "boolean"}
VERBS = words("find open close send move paint count check lock clean fetch start")


TRUTHS = words("done active open")
NUMBERS = words("age size count year level price weight height score")
POOLS = {
    "name": NAMES,
    "city": CITIES,
    "color": COLORS,
    "item": THINGS,
    "day": DAYS,
    "room": ROOMS,
    "food": FOODS,
    "to": NAMES,
    "place": NOUNS,
    "mood": TRAITS,
}


def field(rng: Random, name: str) -> str | int | bool:
    """A value that suits the field's name."""
    if name in TRUTHS:
        return rng.random() < 0.5
    if name in NUMBERS:
        return rng.randrange(10 ** rng.randint(1, 4))
    text = pick(rng, POOLS.get(name, NOUNS))
    return f"{text} {pick(rng, NOUNS)}" if rng.random() < 0.15 else text


def spoken(value: object) -> str:
    """A value as the user writes it: JSON's own words for numbers and truth."""
    return value if isinstance(value, str) else json.dumps(value)


def listing(parts: list[str]) -> str:
    """a, b and c."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def write_object(rng: Random) -> Turn:
    """An object with two to five named fields."""
    names = rng.sample(FIELDS, rng.randint(2, 5))
    value = {(rare(rng) if rng.random() < 0.1 else name): field(rng, name) for name in names}
    joint = rng.choice((" ", " ", " = ", ": "))
    say = json.dumps if rng.random() < 0.15 else spoken
    said = listing([f"{k}{joint}{say(v)}" for k, v in value.items()])
    form = rng.choice(
        (
            "Write a JSON object with {}.",
            "Give me JSON with {}.",
            "Make a JSON object: {}.",
            "Return JSON with {}.",
            "As JSON: {}",
            "Make JSON: {}",
            "I need a JSON object with {}.",
        )
    )
    answer = json.dumps(value)
    return Turn(user=form.format(said), answer=answer, identity=answer)


def write_list(rng: Random) -> Turn:
    """A list of words or numbers."""
    pool = rng.choice((COLORS, NAMES, FOODS))
    items = range(rng.randint(2, 6))
    numbers, texts = [rng.randrange(1000) for _ in items], [pick(rng, pool) for _ in items]
    value = rng.choice((numbers, texts, texts))
    form = rng.choice(("Write a JSON list of {}.", "Give me a JSON list with {}."))
    said, answer = listing([spoken(v) for v in value]), json.dumps(value)
    return Turn(user=form.format(said), answer=answer, identity=answer)


def schema(name: str, description: str, /, **types: type) -> Tool:
    """A tool in the form that chat templates take."""
    properties = {k: {"type": TYPES[t]} for k, t in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def some_words(rng: Random) -> str:
    """One to five words of a message."""
    return " ".join(pick(rng, NOUNS) for _ in range(rng.randint(1, 5)))


Fixed = tuple[Tool, tuple[str, ...], Callable[[Random], dict[str, Any]], str, str]
FIXED: tuple[Fixed, ...] = (
    (
        schema("get_weather", "Get the weather in a city.", city=str),
        ("What is the weather in {city}?", "How is the weather in {city}?", "Weather in {city}?",
         "Is it warm in {city}?", "Tell me the weather in {city}."),
        lambda r: {"city": pick(r, CITIES)},
        '{{"temperature": {n}, "sky": "{w}"}}',
        "It is {n} degrees and {w} in {city}.",
    ),
    (
        schema("get_time", "Get the time in a city.", city=str),
        ("What time is it in {city}?", "Tell me the time in {city}.", "Time in {city}?"),
        lambda r: {"city": pick(r, CITIES)},
        '{{"time": "{n}:30"}}',
        "It is {n}:30 in {city}.",
    ),
    (
        schema("set_timer", "Start a timer.", minutes=int),
        ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.",
         "Wake me in {minutes} minutes."),
        lambda r: {"minutes": r.randrange(1, 100)},
        '{{"ok": true}}',
        "The timer is set for {minutes} minutes.",
    ),
    (
        schema("add_numbers", "Add two numbers.", a=int, b=int),
        ("Use the tool to add {a} and {b}.", "Add {a} and {b} with the tool.",
         "Call add_numbers with {a} and {b}."),
        lambda r: {"a": r.randrange(1000), "b": r.randrange(1000)},
        '{{"sum": {s}}}',
        "The sum is {s}.",
    ),
    (
        schema("send_message", "Send a message to a person.", to=str, text=str),
        ("Send {to} a message: {text}", "Tell {to} this: {text}", "Write to {to}: {text}"),
        lambda r: {"to": pick(r, NAMES), "text": some_words(r)},
        '{{"sent": true}}',
        "I sent your message to {to}.",
    ),
    (
        schema("set_light", "Switch a light.", room=str, on=bool),
        ("Switch the light in the {room} {state}.", "Turn the {room} light {state}.",
         "Please turn {state} the light in the {room}."),
        lambda r: {"room": pick(r, ROOMS), "on": r.random() < 0.5},
        '{{"ok": true}}',
        "The light in the {room} is {state}.",
    ),
    (
        schema("book_table", "Book a table.", people=int, day=str),
        ("Book a table for {people} on {day}.", "Reserve a table on {day} for {people} people.",
         "I need a table for {people} on {day}."),
        lambda r: {"people": r.randrange(1, 13), "day": r.choice(DAYS)},
        '{{"number": {n}}}',
        "Your table for {people} on {day} has number {n}.",
    ),
)  # fmt: skip


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """The reply that hermes-style parsers read as a tool call."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


BY_NAME = {entry[0]["function"]["name"]: entry for entry in FIXED}


def built_in(rng: Random, entry: Fixed) -> Turn:
    """A turn that needs a built-in tool: the request, the call, a result, what to say of it."""
    tool, asks, make, result, said = entry
    arguments = make(rng)
    slots = {**arguments, "n": rng.randrange(1, 40), "w": rng.choice(("sunny", "cloudy", "rainy"))}
    slots["state"] = "on" if arguments.get("on") else "off"
    slots["s"] = arguments.get("a", 0) + arguments.get("b", 0)
    answer = call_text(tool["function"]["name"], arguments)
    return Turn(
        user=rng.choice(asks).format_map(slots),
        answer=answer,
        identity=answer,
        tool_result=result.format_map(slots),
        follow_up=said.format_map(slots),
    )


def made_up(rng: Random) -> Tool:
    """A tool nobody has seen: its name and fields must be read off the schema."""
    verb, noun = pick(rng, VERBS).lower(), pick(rng, NOUNS).lower()
    names = rng.sample((*FIELDS, "to", "place", "mood"), rng.randint(1, 3))
    types = {name: type(field(rng, name)) for name in names}
    return schema(f"{verb}_{noun}", f"{verb.capitalize()} a {noun}.", **types)


def invoke(rng: Random, tool: Tool) -> Turn:
    """A turn that needs this tool."""
    function = tool["function"]
    if function["name"] in BY_NAME:
        return built_in(rng, BY_NAME[function["name"]])
    verb, noun = function["name"].split("_")
    arguments = {name: field(rng, name) for name in function["parameters"]["properties"]}
    said = listing([f"{k} {spoken(v)}" for k, v in arguments.items()])
    form = rng.choice(("{v} a {n} with {s}.", "{v} the {n} with {s}.", "Please {l} a {n}: {s}."))
    user = form.format(v=verb.capitalize(), l=verb, n=noun, s=said)
    answer = call_text(function["name"], arguments)
    return Turn(
        user=user, answer=answer, identity=answer, tool_result='{"ok": true}', follow_up="Done."
    )


def pick_tool(rng: Random) -> Tool:
    """A built-in tool, or a made-up one."""
    return rng.choice(FIXED)[0] if rng.random() < 0.6 else made_up(rng)


def described(tool: Tool) -> Tool:
    """The same tool with a description of every field, as careful callers write them."""
    function = tool["function"]
    fields = function["parameters"]["properties"]
    wordy = {name: {**kind, "description": f"The {name}."} for name, kind in fields.items()}
    parameters = {**function["parameters"], "properties": wordy}
    return {**tool, "function": {**function, "parameters": parameters}}


def offer(rng: Random) -> tuple[Tool, ...]:
    """One to three tools, no name twice; three times in ten with described fields."""
    drawn = [pick_tool(rng) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.3:
        drawn = [described(tool) for tool in drawn]
    return tuple({tool["function"]["name"]: tool for tool in drawn}.values())
