"""The files that turn chats into tokens: tokenizer and chat template, tried before a start.

Without this look a server with a broken template becomes ready and answers every chat with 400.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moet.base.errors import CheckpointError, UsageError
from moet.checkpoint.faults import BrokenCheckpoint, require_regular

if TYPE_CHECKING:
    from jinja2 import Environment

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (TOKENIZER, "tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json")
TEMPLATE = "chat_template.jinja"
TEMPLATE_JSON = "chat_template.json"
JINJA = ("{", "}", "\n")  # vLLM takes a --chat-template with one of these for a template itself

HELLO = "Hello"
CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": HELLO}],
    [{"role": "user", "content": [{"type": "text", "text": HELLO}]}],
)
"""One question in the two forms that templates take."""


def require_tokenizer(folder: Path) -> None:
    """Raises CheckpointError where there is no tokenizer, or one that cannot be read."""
    if not any(os.path.lexists(folder / name) for name in TOKENIZER_FILES):
        hint = (
            "copy tokenizer.json and tokenizer_config.json of the model into that folder "
            "(moet synth writes them, unless its --vocab is below 1024)"
        )
        raise CheckpointError(f"{folder} has no tokenizer", hint=hint)
    _read_object(folder / CONFIG)
    if _read_object(folder / TOKENIZER):
        _try_tokenizer(folder / TOKENIZER)


def _damaged(file: Path, why: object) -> CheckpointError:
    hint = f"download {file.name} of the model again"
    return CheckpointError(f"{file} cannot be read: {why}", hint=hint)


def _read_text(file: Path) -> str:
    try:
        require_regular(file)
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(file, getattr(error, "strerror", None) or error) from error


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where there is no file."""
    if not os.path.lexists(file):  # a link that leads nowhere is one that cannot be read
        return {}
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise _damaged(file, "not a JSON object")
    return value


def _try_tokenizer(file: Path) -> None:
    """Loads it with the engine's own library, where that is installed."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return
    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more special
        raise _damaged(file, error) from error


def require_chat_template(folder: Path, asked: str | None) -> None:
    """Renders the question "Hello" as the engine would; nothing to do where there is no template.

    Args:
        folder: of the model.
        asked: the value of ``--chat-template``; None: the model's own.

    Raises:
        UsageError: ``--chat-template`` names no file, or its template cannot be used.
        CheckpointError: the model's own cannot be used.
    """
    if asked is not None:
        if why := _fault(_asked_template(asked), folder):
            raise UsageError(f"--chat-template: {why}", hint="repair the template")
        return
    file, template = next(_templates(folder), (folder, ""))
    if template and (why := _fault(template, folder)):
        hint = f"download {file.name} of the model again, or pass another: --chat-template FILE"
        raise CheckpointError(f"{file}: {why}", hint=hint)


def _asked_template(asked: str) -> str:
    """A file, or the template itself, by vLLM's rule."""
    try:
        require_regular(Path(asked))
        return Path(asked).read_text(encoding="utf-8")
    except (OSError, ValueError, BrokenCheckpoint) as error:
        if any(mark in asked for mark in JINJA):
            return asked
        hint = "give the path of a Jinja template"
        raise UsageError(f"--chat-template {asked!r:.80} cannot be read", hint=hint) from error


def _templates(folder: Path) -> Iterator[tuple[Path, str]]:
    """The model's chat templates and where they stand, the one that counts first."""
    if os.path.lexists(file := folder / TEMPLATE):
        yield file, _read_text(file)
    for name in (TEMPLATE_JSON, CONFIG):
        content = _read_object(folder / name).get("chat_template")
        if isinstance(content, list):  # several, by name
            named = {t.get("name"): t.get("template") for t in content if isinstance(t, dict)}
            content = named.get("default")
        if isinstance(content, str) and content:
            yield folder / name, content


def _environment() -> Environment:
    """Jinja as Transformers sets it up for chat templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``: marks text for training; here it is only text."""

        tags = {"generation"}  # noqa: RUF012 - the base class declares it so

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = as_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _special_tokens(folder: Path) -> dict[str, str]:
    """``bos_token`` and the like, which templates may name."""
    words = {k: v for k, v in _read_object(folder / CONFIG).items() if k.endswith("_token")}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in words.items()}
    return {k: v for k, v in texts.items() if isinstance(v, str)}


def _fault(template: str, folder: Path) -> str:
    """What is wrong with a template; empty: nothing, or nobody here can tell."""
    try:
        from jinja2 import TemplateSyntaxError
    except ImportError:
        return ""
    try:
        compiled = _environment().from_string(template)
    except TemplateSyntaxError as error:
        return f"the chat template has an error in line {error.lineno}: {error.message}"
    faults = []
    for chat in CHATS:
        try:
            compiled.render(
                messages=chat,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **_special_tokens(folder),
            )
        except Exception as error:  # a template can do anything
            faults.append(f"{type(error).__name__}: {error}")
        else:
            return ""
    return f"the chat template cannot render a question: {faults[0]}"
