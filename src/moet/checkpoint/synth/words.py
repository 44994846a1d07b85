"""A tokenizer for a random-weight checkpoint, so that it can be served: a small one, filled up.

Text is cut into the words of a tokenizer that is at hand; every id above those decodes to its
number, so that whatever a random model says can be read.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"


def write_tokenizer(folder: Path, vocab: int, small: Path) -> int:
    """Writes tokenizer, its config and a chat template.

    Args:
        folder: of the checkpoint.
        vocab: its words.
        small: folder of a byte-level BPE tokenizer.

    Returns:
        0, or, where the vocabulary is too small for that tokenizer and nothing is written, the
        words that it needs.
    """
    content = json.loads((small / TOKENIZER).read_text(encoding="utf-8"))
    words: dict[str, int] = content["model"]["vocab"]
    if vocab < len(words):
        return len(words)
    # No merge leads to these, so no text becomes one of them. A byte-level BPE writes a blank so.
    words |= {
        f"\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}<{i}>": i for i in range(len(words), vocab)
    }
    text = json.dumps(content, ensure_ascii=False, indent=0)
    (folder / TOKENIZER).write_text(text, encoding="utf-8")
    config = json.loads((small / CONFIG).read_text(encoding="utf-8"))
    config.pop("model_max_length", None)  # config.json says how long a chat may be
    (folder / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
    shutil.copyfile(small / TEMPLATE, folder / TEMPLATE)
    return 0
