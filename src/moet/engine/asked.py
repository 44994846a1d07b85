"""What flags for vLLM ask of moet, read before vLLM is: its import alone takes many seconds.

Only the flags that ``refuse.arguments`` and the planner look at, by vLLM's rules: dashes or
underscores, short names, ``--flag=value``, the last one given, ``--json-flag.key value``. vLLM
reads them all again later, and a file of flags (``--config``) too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any, NoReturn

from moet.base.errors import UsageError
from moet.engine import kvcache

COUNTS = {
    "--tensor-parallel-size": "-tp",
    "--data-parallel-size": "-dp",
    "--pipeline-parallel-size": "-pp",
    "--prefill-context-parallel-size": "-pcp",
    "--nnodes": "-n",
}
SWITCHES = {
    "--enable-expert-parallel": "-ep",
    "--enable-eplb": "",
    "--enable-elastic-ep": "",
    "--enable-lora": "",
}
SIZES = ("--max-model-len", "--kv-cache-memory-bytes")
DRAFTS = ("--spec-method", "--spec-model", "--spec-tokens")
TEXTS = (*DRAFTS, "--moe-backend", "--chat-template", "--tokenizer", "--config")
OBJECTS = {
    "--additional-config": "",
    "--speculative-config": "-sc",
    "--model-loader-extra-config": "",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = "vLLM's documentation says what the flag takes; moet reads it too"
        raise UsageError(message.removeprefix("argument "), hint=hint)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)


def _size(text: str) -> int:
    """A number as vLLM reads it; 0: it shall find one."""
    count = 0 if text in ("auto", "-1") else kvcache.parse_count(text)
    if count is None or (count == 0 and text[0] == "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; 4096, 32k or auto are")
    return count


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a JSON object")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name, short in COUNTS.items():
        parser.add_argument(name, *filter(None, [short]), type=_count, default=1)
    for name, short in SWITCHES.items():
        action = argparse.BooleanOptionalAction
        parser.add_argument(name, *filter(None, [short]), action=action, default=False)
    for name in SIZES:
        parser.add_argument(name, type=_size)
    for name in TEXTS:
        parser.add_argument(name)
    for name, short in OBJECTS.items():
        parser.add_argument(name, *filter(None, [short]), type=_object)
    return parser


def _dashed(word: str) -> str:
    """A flag with the dashes that its name is known by; anything else as it is."""
    if not word.startswith("--"):
        return word
    head, equals, value = word.partition("=")
    name, dot, keys = head.partition(".")
    return name.replace("_", "-") + dot + keys + equals + value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _words(extra: tuple[str, ...]) -> Iterator[str]:
    """The arguments, with ``--json-flag.key value`` put together as ``--json-flag OBJECT``."""
    objects = {name: name for name in OBJECTS} | {s: name for name, s in OBJECTS.items() if s}
    nested: dict[str, dict[str, Any]] = {}
    words = iter(map(_dashed, extra))
    for word in words:
        head, equals, value = word.partition("=")
        name, dot, path = head.partition(".")
        if dot and name in objects:
            place = nested.setdefault(objects[name], {})
            *outer, last = path.split(".")
            for key in outer:
                place = place.setdefault(key, {})
            place[last] = _value(value if equals else next(words, ""))
        else:
            yield word
    for name, content in nested.items():
        yield from (name, json.dumps(content))


def read(extra: tuple[str, ...]) -> argparse.Namespace:
    """The flags that moet looks at, under vLLM's own names of them.

    Args:
        extra: arguments for vLLM, as they were typed.

    Raises:
        UsageError: one of them has a value that cannot be read.
    """
    return _parser().parse_known_args(list(_words(extra)))[0]
