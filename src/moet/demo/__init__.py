"""moet-tiny: a small trained MoE that ships with the package, and the tasks it was trained for."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

NAME = "moet-tiny"


def path() -> Path:
    """The checkpoint folder: config, tokenizer, shards. vLLM and transformers load it as it is."""
    return Path(str(files(__name__))) / NAME
