"""Worker processes that keep a pool of rows fresh; the trainer draws from it and never waits."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from training.mixture import conversation

Row = tuple[np.ndarray, np.ndarray]
WARM_ROWS = 64


def encode_row(rng: Random, length: int, tokenizer: Tokenizer) -> Row:
    """Token ids [length] uint16 and loss weights in percent [length] uint8."""
    talk = conversation(rng, length)
    ids: list[int] = []
    weights: list[int] = []
    while len(ids) < length:
        segments = next(talk)
        texts = [text for text, _ in segments]
        for one, (_, weight) in zip(tokenizer.encode_batch_fast(texts), segments, strict=True):
            ids += one.ids
            weights += [weight] * len(one.ids)
    return np.array(ids[:length], np.uint16), np.array(weights[:length], np.uint8)


class Pool:
    """Rows of one length: ids [rows, length] uint16, weights [rows, length] uint8, on disk pages.

    Worker w writes rows w, w + workers, ... around and around; filled[w] counts what it wrote.
    """

    def __init__(self, folder: Path, length: int, rows: int, workers: int) -> None:
        def pages(name: str, dtype: type, *shape: int) -> np.memmap:
            return np.memmap(folder / f"{name}-{length}", dtype, "w+", shape=shape)

        self.length, self.workers = length, workers
        self.per_worker = rows // workers
        self.ids = pages("ids", np.uint16, self.per_worker, workers, length)
        self.weights = pages("weights", np.uint8, self.per_worker, workers, length)
        self.filled = pages("filled", np.int64, workers)

    def put(self, worker: int, row: Row) -> None:
        """The worker's next row, over its oldest one when the pool is full."""
        at = self.filled[worker] % self.per_worker
        self.ids[at, worker], self.weights[at, worker] = row
        self.filled[worker] += 1

    def ready(self) -> int:
        """Rows that may be drawn."""
        return int(min(self.filled.min(), self.per_worker)) * self.workers

    def draw(self, rng: np.random.Generator, rows: int) -> Row:
        """That many rows, any of those written: ids and weights [rows, length]."""
        deep = int(min(self.filled.min(), self.per_worker))
        at = rng.integers(0, deep, rows), rng.integers(0, self.workers, rows)
        return self.ids[at], self.weights[at]


def work(worker: int, seed: int, pools: Mapping[int, Pool], path: str) -> None:
    """Forever: a row of the emptiest length (shortest first while warming up)."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(path)
    rng = Random(f"moet-tiny/train/{seed}/{worker}")
    shortest = min(pools)
    while True:
        warm = pools[shortest].filled[worker] >= WARM_ROWS
        length = rng.choice(list(pools)) if warm else shortest
        for _ in range(max(pools) // length):
            pools[length].put(worker, encode_row(rng, length, tokenizer))


class Feeder:
    """The pools and their workers. Start it before anything touches the GPU: it forks."""

    def __init__(self, tokenizer: Path, rows: Mapping[int, int], workers: int, seed: int) -> None:
        folder = Path(tempfile.mkdtemp(prefix="rows-"))
        self.pools = {n: Pool(folder, n, count, workers) for n, count in rows.items()}
        fork = multiprocessing.get_context("fork")
        args = (seed, self.pools, str(tokenizer))
        self.workers = [
            fork.Process(target=work, args=(w, *args), daemon=True) for w in range(workers)
        ]
        for process in self.workers:
            process.start()

    def fresh_tokens(self) -> int:
        """All tokens written so far."""
        return sum(int(p.filled.sum()) * p.length for p in self.pools.values())

    def alive(self) -> bool:
        """Whether every worker still runs."""
        return all(process.is_alive() for process in self.workers)

    def stop(self) -> None:
        """End the workers."""
        for process in self.workers:
            process.terminate()
