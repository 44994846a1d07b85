"""How fast packs are written: `python benchmarks/pack.py CHECKPOINT FOLDER OUT.json`.

Takes turns with plain reads of the checkpoint's largest file and plain writes to FOLDER, of blocks
as large as a record, past the page cache, by as many threads: the disk's own speed in the same run.
Both are measured alone and at once, since a disk may share its speed between them, and a pack is
read and written at once. The checkpoint's pages are dropped from the cache before it is packed.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from moet.bench.record import make_record
from moet.checkpoint import Checkpoint, open_checkpoint
from moet.pack.blockfile import BlockFile, aligned_buffer
from moet.pack.check import check_pack
from moet.pack.reader import open_pack
from moet.pack.sweep import Sweep, Work
from moet.pack.writer import plan_pack, write_pack

TURNS = 5
THREADS = 4
MOST_BYTES = 2 << 30  # of a plain read or write

Row = dict[str, Any]


def swept(count: int, nbytes: int, worker: Callable[[], Work], end: Callable[[], object]) -> float:
    """Bytes a second of ``count`` blocks by all threads."""
    start = time.perf_counter()
    Sweep(range(count), THREADS, worker, "probe").run(lambda: None)
    end()
    return count * nbytes / (time.perf_counter() - start)


def plain_read(checkpoint: Checkpoint, nbytes: int) -> float:
    """Of the checkpoint's largest file."""
    largest = max(checkpoint.shards.files, key=lambda file: file.stat().st_size)
    count = min(MOST_BYTES, largest.stat().st_size) // nbytes
    with BlockFile(largest) as file:

        def worker() -> Work:
            buffer = aligned_buffer(nbytes)
            return lambda index: file.read(buffer, index * nbytes)

        return swept(count, nbytes, worker, lambda: None)


def plain_write(folder: Path, nbytes: int, total: int) -> float:
    """To a file of its own, until it is on the disk."""
    count = min(MOST_BYTES, total) // nbytes
    path = folder / "probe.bin"
    try:
        with BlockFile(path, write=True) as file:
            file.resize(count * nbytes)

            def worker() -> Work:
                buffer = aligned_buffer(nbytes)
                buffer[:] = bytearray(os.urandom(4096)) * (nbytes // 4096)
                return lambda index: file.write(buffer, index * nbytes)

            return swept(count, nbytes, worker, file.sync)
    finally:
        path.unlink(missing_ok=True)


def at_once(checkpoint: Checkpoint, folder: Path, nbytes: int, total: int) -> float:
    """The slower of a plain read and a plain write that run together."""
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(plain_read, checkpoint, nbytes)
        writing = pool.submit(plain_write, folder, nbytes, total)
        return min(reading.result(), writing.result())


def drop_cache(checkpoint: Checkpoint) -> None:
    """The kernel forgets the checkpoint's pages."""
    for file in checkpoint.shards.files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def turn(checkpoint: Checkpoint, folder: Path) -> Row:
    """One turn of everything; GB/s."""
    plan = plan_pack(checkpoint, [folder])
    nbytes = plan.layout.record_bytes
    row = {"read": plain_read(checkpoint, nbytes)}
    row["write"] = plain_write(folder, nbytes, plan.nbytes)
    row["at_once"] = at_once(checkpoint, folder, nbytes, plan.nbytes)
    drop_cache(checkpoint)
    busy = time.process_time()
    report = write_pack(checkpoint, [folder], threads=THREADS, drop_cache=True)
    row["pack"] = report.rate
    cpu = time.process_time() - busy
    checked = check_pack(open_pack(report.folder), threads=THREADS)
    row["check"] = checked.nbytes / checked.seconds
    shutil.rmtree(report.folder)
    rates = {f"{name}_gb_s": rate / 1e9 for name, rate in row.items()}
    ratios = {"of_slower": row["pack"] / min(row["read"], row["write"])}
    ratios["of_at_once"] = row["pack"] / row["at_once"]
    return {"kind": "turn", **rates, **ratios, "pack_cpu_seconds": cpu}


def main(model: str, folder: Path, out: Path) -> None:
    """Measures and writes the record."""
    checkpoint = open_checkpoint(model)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [turn(checkpoint, folder) for _ in range(TURNS)]
    names = [name for name in rows[0] if name != "kind"]
    middle = {name: median(row[name] for row in rows) for name in names}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    load = os.getloadavg()[0]
    setup = {"threads": THREADS, "expert_bytes": checkpoint.expert_bytes, "load": load}
    results = [{"kind": "median", **middle, "peak_bytes": peak}, *rows]
    out.write_text(make_record("pack", setup, results).to_json() + "\n")
    sys.stdout.write(f"{middle} peak {peak / 1e6:.0f} MB\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
