"""moet-tiny through transformers on a card: the same answers however its experts are split.

    python benchmarks/hybrid_transformers.py [--prompts N] [--tokens N] [--shares 0 0.3 1]

Held-out prompts of the demo are answered greedily with none, a part and all of the experts on the
card, and with none once more, token by token in eager mode, then with the decode step replayed from
a CUDA graph. Tokens and log-probabilities of every share must equal those of the first with ==; so
must those of graph and eager mode. Beside it, for scale: how many answers are right, and how far
the same model on the CPU alone is (its attention is another machine's arithmetic, not bit for bit).

Writes `benchmarks/records/hybrid-transformers.json`; ends with status 1 where anything differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks/records/hybrid-transformers.json"
SEED = 20261201
ON_CPU = 6
"""Prompts, one of each kind, that the CPU alone answers too."""

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the same workspace in graphs and outside
    "OMP_WAIT_POLICY": "PASSIVE",  # torch's threads leave the cores to moet's
}

Row = dict[str, Any]


def repeatable() -> None:
    """Makes torch's own part of the model the same in every run: attention in plain matrix
    products, deterministic algorithms. Without, two runs of the same differed in a bit."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def samples_of(count: int) -> list[Any]:
    """Held-out questions, of every kind in turn."""
    from moet.demo import tasks

    each = -(-count // len(tasks.KINDS))
    drawn = [tasks.heldout(kind, each, seed=SEED) for kind in tasks.KINDS]
    return [sample for turn in zip(*drawn, strict=True) for sample in turn][:count]


def tokenised(tokenizer: Any, sample: Any) -> list[int]:
    """A question as the model gets it."""
    ids: list[int] = tokenizer.apply_chat_template(
        list(sample.messages),
        tools=list(sample.tools) or None,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    return ids


def said(tokenizer: Any, answer: Any) -> str:
    """The text of an answer up to its end."""
    tokens = list(answer.tokens)
    end = tokenizer.eos_token_id
    text: str = tokenizer.decode(tokens[: tokens.index(end)] if end in tokens else tokens)
    return text


def compare(these: list[Any], those: list[Any]) -> Row:
    """How two lists of answers differ: places, and the greatest distance where tokens agree."""
    pairs = [
        pair
        for a, b in zip(these, those, strict=True)
        for pair in zip(a.tokens, a.logprobs, b.tokens, b.logprobs, strict=True)
    ]
    distances = [abs(x - y) for s, x, t, y in pairs if s == t]
    return {
        "tokens": len(pairs),
        "tokens_that_differ": sum(s != t for s, _, t, _ in pairs),
        "logprobs_that_differ": sum(x != y for _, x, _, y in pairs),
        "logprob_distance_max": max(distances, default=None),
    }


class Trial:
    """One model, its prompts, and what it has said so far by mode and share."""

    def __init__(self, served: Any, tokenizer: Any, samples: list[Any], tokens: int) -> None:
        from moet.engine.transformers_greedy import Greedy

        self.served, self.tokenizer, self.samples, self.tokens = served, tokenizer, samples, tokens
        self.prompts = [tokenised(tokenizer, sample) for sample in samples]
        self.greedy = Greedy
        self.length = max(map(len, self.prompts)) + tokens

    def answers(self, *, captured: bool) -> tuple[list[Any], float]:
        """All answers, and the seconds they took; a graph's capture is not counted."""
        greedy = self.greedy(self.served, self.length, captured=captured)
        greedy.answer(self.prompts[0], 2)
        start = time.perf_counter()
        got = [greedy.answer(prompt, self.tokens) for prompt in self.prompts]
        return got, time.perf_counter() - start

    def right(self, got: list[Any]) -> int:
        """Answers that the task's own judge accepts."""
        from moet.demo import tasks

        pairs = zip(self.samples, got, strict=True)
        return sum(tasks.correct(sample, said(self.tokenizer, answer)) for sample, answer in pairs)


def on_card(trial: Trial, share: float, captured: bool) -> tuple[Row, list[Any]]:
    """Answers with a share of the experts on the card."""
    from moet.engine.transformers_adapter import split_of

    served, mailbox = trial.served, trial.served.experts.mailbox
    served.place(split_of(served.checkpoint.geometry, share))
    before, busy = mailbox.answered, mailbox.busy_seconds
    got, seconds = trial.answers(captured=captured)
    row = {
        "kind": "answers",
        "mode": "graph" if captured else "eager",
        "share_on_card": share,
        "experts_on_card": served.experts.resident,
        "requests_to_cpu": mailbox.answered - before,
        "cpu_busy_s": mailbox.busy_seconds - busy,
        "seconds": seconds,
        "answers": len(got),
        "right": trial.right(got),
    }
    return row, got


def measure(trial: Trial, shares: list[float], rows: list[Row]) -> None:
    """A row for each mode and share, compared with the first of its mode; then mode with mode."""
    firsts: dict[bool, list[Any]] = {}
    for captured in (False, True):
        for share in [*shares, shares[0]]:  # once more at the end: what repeats itself anyway
            row, got = on_card(trial, share, captured)
            first = firsts.setdefault(captured, got)
            rows.append(row | compare(got, first))
            print(rows[-1], flush=True)
    rows.append({"kind": "graph against eager", **compare(firsts[True], firsts[False])})
    print(rows[-1], flush=True)
    rows.append(against_cpu(trial, firsts[False]))


def against_cpu(trial: Trial, got: list[Any]) -> Row:
    """The same model on the CPU alone, for scale."""
    from moet import demo
    from moet.engine.transformers_adapter import load_on_cpu

    samples, got = trial.samples[:ON_CPU], got[:ON_CPU]
    with load_on_cpu(demo.path()) as served:
        alone = Trial(served, trial.tokenizer, samples, trial.tokens)
        other, _ = alone.answers(captured=False)
    texts = [[said(trial.tokenizer, answer) for answer in answers] for answers in (got, other)]
    row = {
        "kind": "card against CPU",
        "answers": len(got),
        "same_texts": sum(a == b for a, b in zip(*texts, strict=True)),
        "right": alone.right(other),
    }
    print(row, flush=True)
    return row


def wrong(rows: list[Row]) -> list[Row]:
    """Rows with a token or a log-probability that differs."""
    keys = ("tokens_that_differ", "logprobs_that_differ")
    return [row for row in rows if any(row.get(key) for key in keys)]


def setup_of(trial: Trial) -> Row:
    """What was run, and with what."""
    import torch
    import transformers

    from moet import demo

    experts = trial.served.experts
    return {
        "model": demo.NAME,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "mailbox": str(experts.mailbox.variant),
        "threads": experts.pool.threads,
        "prompts": len(trial.prompts),
        "prompt_tokens": sum(map(len, trial.prompts)),
        "tokens": trial.tokens,
    }


def main() -> None:
    """Measures, records, says whether all is equal."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--prompts", type=int, default=18)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.3, 1.0])
    parser.add_argument("--record", type=Path, default=RECORD)
    asked = parser.parse_args()

    import transformers

    from moet import demo
    from moet.bench.record import make_record
    from moet.engine.transformers_card import load_on_card

    repeatable()
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo.path())
    rows: list[Row] = []
    with load_on_card(demo.path(), capacity_bytes=64 << 20) as served:
        trial = Trial(served, tokenizer, samples_of(asked.prompts), asked.tokens)
        setup = setup_of(trial)
        try:
            measure(trial, asked.shares, rows)
        finally:  # what was measured before a failure is kept
            record = make_record("hybrid-transformers", setup, rows)
            asked.record.write_text(record.to_json() + "\n")
    if odd := wrong(rows):
        sys.exit(f"{len(odd)} of {len(rows)} rows differ")
    print(f"equal: {len(asked.shares)} shares, eager and captured, {rows[0]['tokens']} tokens each")


if __name__ == "__main__":
    main()
