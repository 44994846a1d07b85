"""The flags that vLLM knows, read from its sources: its import takes many seconds.

A mistyped flag is then an error before anything starts. What neither moet nor this reading knows
and what resembles nothing is left to vLLM's own parser.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from moet.base.errors import UsageError

OURS = ("--host", "--port", "--api-key", "--compile", "--verbose", "--json", "--help")
SOURCES = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py", "utils/argparse_utils.py")
LITERAL = re.compile(r'"(--[a-z][\w-]*)"')
LIKE = 0.75  # of 1: how much a mistyped flag has in common with the one that was meant


def _fields(source: str) -> Iterator[str]:
    """Names of flags that vLLM makes of the fields of its classes of arguments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
            for entry in node.body:
                if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                    yield "--" + entry.target.id.replace("_", "-")


@lru_cache(maxsize=1)
def of_vllm() -> frozenset[str]:
    """Long flags of the installed vLLM; none where it is missing or has other sources."""
    spec = importlib.util.find_spec("vllm")
    found: set[str] = set()
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for name in SOURCES:
            try:
                source = (Path(root) / name).read_text(encoding="utf-8")
                found |= {*LITERAL.findall(source), *_fields(source)}
            except (OSError, ValueError, SyntaxError):  # another vLLM: it names its own flags
                return frozenset()
    return frozenset(found)


def require_known(extra: tuple[str, ...]) -> None:
    """Raises UsageError for a flag that nobody knows and that resembles one that is known.

    Args:
        extra: arguments for vLLM, as they were typed.
    """
    known = of_vllm()
    if not known:
        return
    names = sorted({*known, *OURS})
    for word in extra:
        flag = re.split(r"[=.]", word, maxsplit=1)[0].replace("_", "-")
        positive = "--" + flag.removeprefix("--no-")
        if not flag.startswith("--") or flag in names or positive in names:
            continue
        if near := difflib.get_close_matches(flag, names, n=1, cutoff=LIKE):
            hint = f"did you mean {near[0]}?"
            raise UsageError(f"neither moet nor vLLM knows {flag}", hint=hint)
