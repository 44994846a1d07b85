"""How fast experts get onto the card: `python benchmarks/upload.py OUT.json`.

Records of V4.1-Flash's size go from a RAM tier to a card tier, straight from page-locked memory or
by way of the staging buffers, against plain copies from page-locked memory in the same run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from moet.bench.record import make_record
from moet.formats.tiling import ExpertLayout
from moet.kernels.cuda.memory import CudaMemory
from moet.tiers.api import ExpertKey, Lease
from moet.tiers.card import CardTier
from moet.tiers.ram import RamTier

RECORD_BYTES = ExpertLayout(5120, 2304, False).record_bytes
RECORDS = 96
REPEATS = 5
THREADS = (1, 2, 4, 8)
STAGING = 16

Row = dict[str, Any]


def seconds(work: Callable[[], object], after: Callable[[], object] = lambda: None) -> float:
    """Median wall time; `after` is not timed."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
        after()
    return median(times)


def row(what: str, threads: int, took: float, ceiling: float | None = None) -> Row:
    """One line of the record."""
    rate = RECORDS * RECORD_BYTES / took
    return {
        "kind": "upload",
        "what": what,
        "threads": threads,
        "seconds": took,
        "gb_s": rate / 1e9,
        "ratio": rate / ceiling if ceiling else 1.0,
    }


def plain_copies(memory: CudaMemory) -> float:
    """Seconds of the same bytes from page-locked memory, enqueued at once: the ceiling."""
    here, there = memory.pin(8 * RECORD_BYTES), memory.allocate(8 * RECORD_BYTES)

    def work() -> None:
        offsets = [i % 8 * RECORD_BYTES for i in range(RECORDS)]
        events = [memory.copy_in(there + at, here + at, RECORD_BYTES) for at in offsets]
        memory.wait(events[-1])
        for event in events:
            memory.drop(event)

    took = seconds(work)
    memory.unpin(here)
    memory.free(there)
    return took


def clear(card: CardTier) -> None:
    """Empties a tier."""
    for key in list(card.keys()):
        card.evict(key)


def timed_upload(card: CardTier, leases: list[Lease], threads: int) -> float:
    """Seconds of one upload of all records by so many threads."""
    with ThreadPoolExecutor(threads) as pool:

        def work() -> None:
            list(pool.map(card.upload, [leases[i::threads] for i in range(threads)]))

        return seconds(work, lambda: clear(card))


def measure(memory: CudaMemory, ram: RamTier, card: CardTier) -> list[Row]:
    """All rows, the ceiling first."""
    rows = [row("plain copies, page-locked", 1, plain_copies(memory))]
    ceiling = rows[0]["gb_s"] * 1e9
    data = np.random.default_rng(0).integers(0, 256, RECORD_BYTES, np.uint8)
    for key in (keys := [ExpertKey(0, e) for e in range(RECORDS)]):
        ram.put(key, data)

    def put() -> None:
        for key in keys:
            card.put(key, data)

    rows.append(row("put", 1, seconds(put, lambda: clear(card)), ceiling))
    with ExitStack() as held:
        leases: list[Lease] = [held.enter_context(ram.acquire(key)) for key in keys]
        rows += [
            row("upload, staged", threads, timed_upload(card, leases, threads), ceiling)
            for threads in THREADS
        ]
        start = time.perf_counter()
        card.register_host(ram.address_of(0), ram.capacity)
        rows.append(row("page-locking the arena", 1, time.perf_counter() - start, ceiling))
        rows.append(row("upload, direct", 1, timed_upload(card, leases, 1), ceiling))
    return rows


def main() -> None:
    """Measures, prints and writes the record."""
    memory = CudaMemory(0)
    capacity = RECORDS * RECORD_BYTES
    with RamTier(capacity) as ram:
        card = CardTier(memory, capacity, record_bytes=RECORD_BYTES, staging=STAGING)
        rows = measure(memory, ram, card)
        card.close()
    setup = {"record_bytes": RECORD_BYTES, "records": RECORDS, "staging": STAGING,
             "repeats": REPEATS}  # fmt: skip
    for one in rows:
        print(f"{one['what']:28} {one['threads']:2} {one['gb_s']:6.1f} GB/s {one['ratio']:.2f}")
    Path(sys.argv[1]).write_text(make_record("upload", setup, rows).to_json() + "\n")


if __name__ == "__main__":
    main()
