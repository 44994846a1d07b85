"""Time one step at each row length and list the kernels: python -m training.pilot (GPU)."""

from __future__ import annotations

import time
from typing import cast

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from training.feeder import Pool, Row
from training.plan import LENGTHS, Plan
from training.train import Trainer


class Noise:
    """A pool of random rows."""

    def __init__(self, length: int) -> None:
        self.length = length

    def draw(self, rng: np.random.Generator, rows: int) -> Row:
        """ids and weights [rows, length]."""
        shape = (rows, self.length)
        return rng.integers(0, 1024, shape).astype(np.uint16), np.full(shape, 100, np.uint8)


def timed(trainer: Trainer, pool: Pool, steps: int) -> float:
    """Seconds a step."""
    torch.cuda.synchronize()
    start = time.monotonic()
    for _ in range(steps):
        trainer.step(pool, 0.1)
    torch.cuda.synchronize()
    return (time.monotonic() - start) / steps


def main() -> None:
    """Print times and the costliest kernels."""
    trainer = Trainer(Plan(), torch.device("cuda"))
    for n in LENGTHS:
        pool = cast(Pool, Noise(n))
        first = timed(trainer, pool, 1)
        print(n, f"first {first:.1f} s, then {timed(trainer, pool, 10) * 1e3:.1f} ms a step")
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            timed(trainer, pool, 2)
        table = seen.key_averages().table(sort_by="cuda_time_total", row_limit=9)
        print("\n".join(line[:60] + line[-100:] for line in table.splitlines()))
    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
