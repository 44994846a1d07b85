"""``moet chat``: answers to stdout, everything else to stderr."""

from __future__ import annotations

import json as jsonlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moet.base import env
from moet.base.errors import MoetError, UsageError
from moet.cli import console

if TYPE_CHECKING:
    from moet.cli.client import Answer, Client, Message

HELP = (
    "/new starts over; ctrl-C stops an answer; at an empty prompt it leaves, as do ctrl-D and /quit"
)
PROMPT = "> "


def chat(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="Ask this, print the answer, and leave.")
    ] = "",
    *,
    url: Annotated[
        str, typer.Option(help="A server. Without: the newest that runs here, else a new one.")
    ] = "",
    model: Annotated[
        str, typer.Option(help="Start a server for this folder, or `demo`, and end it after.")
    ] = "",
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Longest answer; 0: what fits.")] = 0,
    temperature: Annotated[float, typer.Option(help="0: always the same answer.")] = 0.0,
    json: Annotated[
        bool, typer.Option("--json", help="With a PROMPT: answer and figures as JSON.")
    ] = False,
) -> int:
    """Talk to a model in the terminal.

    Uses a running `moet serve`, or starts a server of its own. Text on stdin is taken as the
    prompt. ctrl-C stops an answer; at an empty prompt it leaves, as ctrl-D does.
    """
    if not 0 <= temperature < math.inf:
        hint = "0 is always the same answer, 1 the model's own variety"
        raise UsageError(f"--temperature {temperature} is not a number from 0 up", hint=hint)
    if max_tokens < 0:
        raise UsageError(f"--max-tokens {max_tokens} is negative", hint="0 means: what fits")
    question = prompt or ("" if sys.stdin.isatty() else read_pipe())
    if not (question or sys.stdin.isatty()):
        raise UsageError("there is nothing to ask", hint='moet chat "How much is 12 + 30?"')
    if json and not question:
        raise UsageError("--json goes with a PROMPT", hint='moet chat --json "Hello"')
    options: dict[str, Any] = {"temperature": temperature}
    if max_tokens:
        options["max_tokens"] = max_tokens
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    with connected(url, model) as client:
        if question:
            return ask_once(client, [*opening, user(question)], options, json=json)
        talk(client, opening, options)
    return 0


def read_pipe() -> str:
    """stdin to its end.

    Raises:
        UsageError: it is not UTF-8.
    """
    try:
        return sys.stdin.buffer.read().decode("utf-8").strip()
    except UnicodeDecodeError as error:
        hint = "convert it first: iconv -f latin1 -t utf-8"
        raise UsageError(
            f"stdin is not UTF-8: {error.reason} at {error.start}", hint=hint
        ) from error


def user(text: str) -> Message:
    """A message of the user."""
    return {"role": "user", "content": text}


@contextmanager
def connected(url: str, model: str) -> Iterator[Client]:
    """A client of the server that was named, of one that runs, or of one that is started here.

    Raises:
        UsageError: both are named.
    """
    from moet.cli.client import Client
    from moet.engine import runfiles

    if url and model:
        hint = "--url for one that runs, --model to start one"
        raise UsageError("--url and --model name two servers", hint=hint)
    key = env.read().api_key
    running = runfiles.running() if not (model or url) else []
    if len(running) > 1:
        found = f"{len(running)} servers run; taking the newest, {running[0].model}"
        console.say(f"{found} at {running[0].url}; --url names another", "dim")
    if url or running:
        yield Client(url or running[0].url, key)
        return
    with own_server(model or "demo") as (where, key):
        yield Client(where, key)


@contextmanager
def own_server(model: str) -> Iterator[tuple[str, str]]:
    """URL and key of a server that lives as long as the block. Nobody else can use it."""
    import secrets

    from moet.cli.starting import wait_until_ready
    from moet.cli.stopping import Stopper
    from moet.engine import preflight, serveplan
    from moet.engine.serve import Server
    from moet.machine import read_machine

    key = secrets.token_urlsafe(24)
    request = serveplan.Request(model=model, port=preflight.free_port(), api_key=key)
    plan = serveplan.make(request, read_machine(), env.read())
    stopper = Stopper()
    stopper.listen()
    with Server(plan) as server:
        try:
            wait_until_ready(server, stopper)
            if stopper.asked:
                raise KeyboardInterrupt
            stopper.leave()
            yield plan.url, key
        finally:
            stopper.hard = server.strike
            stopper.listen()  # from here a ctrl-C must not tear the clean-up apart


def ask_once(
    client: Client, messages: list[Message], options: dict[str, Any], *, json: bool
) -> int:
    """One question, one answer on stdout."""
    from moet.cli.client import Answer

    answer = Answer()
    for piece in client.stream(messages, answer, **options):
        if not json:
            console.write(piece)
    if json:
        console.write(jsonlib.dumps(figures(client, answer)) + "\n")
    else:
        console.write("\n")
    return 0


def figures(client: Client, answer: Answer) -> dict[str, object]:
    """An answer for programs."""
    return {
        "model": client.model,
        "answer": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "tokens": answer.tokens,
        "first_token_seconds": round(answer.first, 4),
        "tokens_per_second": round(answer.rate, 2),
    }


def talk(client: Client, opening: list[Message], options: dict[str, Any]) -> None:
    """Questions and answers until the user leaves."""
    console.say(f"{client.model} at {client.url}", "bold")
    console.say(HELP, "dim")
    messages = list(opening)
    while (line := read_line()) is not None:
        if line in ("/quit", "/exit", "/bye"):
            return
        if line == "/new":
            messages = list(opening)
            console.say("a new conversation", "dim")
        elif line.startswith("/"):
            console.say(HELP, "dim")
        elif line:
            messages.append(user(line))
            reply = hear(client, messages, options)
            if reply is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": reply})


def read_line() -> str | None:
    """What the user types; None to leave. ctrl-C empties the line, on an empty one it leaves."""
    import readline  # gives input() its line editing

    try:
        return input(PROMPT if sys.stdout.isatty() else "").strip()
    except EOFError:
        console.say("")
        return None
    except UnicodeDecodeError:
        console.say("that line is not UTF-8", "yellow")
        return ""
    except KeyboardInterrupt:
        console.say("")
        return "" if readline.get_line_buffer() else None


def hear(client: Client, messages: list[Message], options: dict[str, Any]) -> str | None:
    """Streams an answer to stdout. None when there is nothing to remember of it."""
    from moet.cli.client import Answer

    answer = Answer()
    try:
        for piece in client.stream(messages, answer, **options):
            console.write(piece)
    except KeyboardInterrupt:
        console.say("\n(stopped)", "dim")
        return answer.text or None
    except MoetError as error:
        console.write("\n" if answer.pieces else "")
        console.show_error(error)
        return None
    console.write("\n")
    console.say(
        f"{answer.tokens} tokens, {answer.rate:.0f} a second, first after {answer.first:.2f} s",
        "dim",
    )
    return answer.text


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(chat)
