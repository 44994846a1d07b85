"""Fit the tokenizer on the training mixture: python -m training.make_tokenizer FOLDER."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

from training.geometry import Geometry
from training.mixture import conversation
from training.tokenizer import save, train

CHARACTERS = 4_000_000


def corpus(seed: int) -> Iterator[str]:
    """Short conversations, one segment at a time."""
    rng = Random(f"moet-tiny/tokenizer/{seed}")
    left = CHARACTERS
    while left > 0:
        talk = conversation(rng, 512)
        for _ in range(12):
            for text, _ in next(talk):
                left -= len(text)
                yield text


def main(folder: str) -> None:
    """Train and save."""
    g = Geometry()
    save(train(corpus(0), g.vocab), Path(folder), g.context)


if __name__ == "__main__":
    main(sys.argv[1])
