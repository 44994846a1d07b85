"""Held-out figures by one forward pass a sample: greedy decoding gives the right reply if and only
if, fed the right reply, every one of its tokens is the arg max. Stricter than `correct`: word for
word. Works on the training model and, through `load`, on an exported folder:

python -m training.evaluate FOLDER [SAMPLES]
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from moet.demo.tasks import KINDS, Sample, heldout
from training.chat import END, prompt
from training.load import load
from training.model import TinyMoe

BATCH_TOKENS = 65_536
Item = tuple[Sample, list[int], list[int]]
Exam = dict[str, list[Item]]
Mark = tuple[Sample, int, bool, float, int]


def encode(tokenizer: Tokenizer, samples: Sequence[Sample]) -> list[Item]:
    """Prompt and answer token ids, longest first."""
    items = [
        (s, tokenizer.encode(prompt(s)).ids, tokenizer.encode(s.answer + END).ids) for s in samples
    ]
    return sorted(items, key=lambda item: -len(item[1]) - len(item[2]))


def batches(items: Sequence[Item], limit: int) -> Iterator[list[Item]]:
    """Runs of items whose padded size stays within the limit."""
    batch: list[Item] = []
    for item in items:
        longest = len((batch or [item])[0][1]) + len((batch or [item])[0][2])
        if batch and longest * (len(batch) + 1) > limit:
            yield batch
            batch = []
        batch.append(item)
    yield batch


def padded(batch: Sequence[Item], device: torch.device) -> Tensor:
    """[rows, longest] token ids, zeros behind."""
    rows = [torch.tensor(question + answer) for _, question, answer in batch]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)


@torch.no_grad()
def mark(model: TinyMoe, batch: Sequence[Item]) -> Iterator[Mark]:
    """Per sample: prompt length, word-for-word greedy match, summed loss, answer length."""
    ids = padded(batch, model.model.norm.weight.device)
    hidden = model(ids)[0].unflatten(0, ids.shape)
    for row, (sample, question, answer) in enumerate(batch):
        start, stop = len(question), len(question) + len(answer)
        logits = model.logits(hidden[row, start - 1 : stop - 1]).float()
        target = ids[row, start:stop]
        loss = functional.cross_entropy(logits, target, reduction="sum").item()
        yield sample, start, bool((logits.argmax(-1) == target).all()), loss, len(answer)


def prepare(vocabulary: Path, count: int, seed: int) -> Exam:
    """Held-out samples of every kind, encoded."""
    tokenizer = Tokenizer.from_file(str(vocabulary))
    return {kind: encode(tokenizer, heldout(kind, count, seed)) for kind in KINDS}


def marks(model: TinyMoe, items: Sequence[Item]) -> list[Mark]:
    """Every sample marked."""
    return [m for batch in batches(items, BATCH_TOKENS) for m in mark(model, batch)]


def share(hits: Sequence[bool]) -> float:
    """Right ones in percent."""
    return round(100 * sum(hits) / len(hits), 2) if hits else math.nan


def recall_detail(results: Sequence[Mark]) -> dict[str, dict[str, float]]:
    """Recall by prompt length and by depth of the record (0 = first)."""
    by_length: dict[str, list[bool]] = {}
    by_depth: dict[str, list[bool]] = {}
    for sample, length, hit, _, _ in results:
        low = length // 1024 * 1024
        by_length.setdefault(f"{low}-{low + 1023}", []).append(hit)
        tenth = int(sample.facts["depth"] * 5) * 20
        by_depth.setdefault(f"{tenth:02d}-{tenth + 20} %", []).append(hit)
    return {
        "by_length": {k: share(v) for k, v in sorted(by_length.items())},
        "by_depth": {k: share(v) for k, v in sorted(by_depth.items())},
    }


def evaluate(model: TinyMoe, exam: Exam) -> dict[str, Any]:
    """Percent right a kind, perplexity of the stories, recall in detail."""
    out: dict[str, Any] = {}
    for kind, items in exam.items():
        results = marks(model, items)
        if kind == "text":
            loss, tokens = sum(r[3] for r in results), sum(r[4] for r in results)
            out["text_perplexity"] = round(math.exp(loss / tokens), 4)
            continue
        out[kind] = share([r[2] for r in results])
        if kind == "recall":
            out["recall_detail"] = recall_detail(results)
    return out


def main(folder: Path, count: int) -> None:
    """Print the figures of an exported folder as JSON."""
    state, g = load(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = TinyMoe(g, torch.bfloat16 if device.type == "cuda" else torch.float32)
    model.load_state_dict(state)
    exam = prepare(folder / "tokenizer.json", count, 0)
    print(json.dumps(evaluate(model.to(device), exam), indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200)
