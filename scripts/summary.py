"""The README's table of claims: one row each, every figure from a record."""

from __future__ import annotations

import json

from records import RANGES, RECORDS, ROOT, Row, gigabytes, measured, record, table


def speed(run: Row, who: str, tokens: int) -> Row:
    """The speed row of a CPU record at all its threads."""
    rows = [r for r in run["results"] if r["kind"] == "speed" and r["who"] == who]
    most = max(row["threads"] for row in rows)
    (found,) = (r for r in rows if r["threads"] == most and r["tokens"] == tokens)
    return found


def summary() -> str:
    """One row a claim."""
    rows = [summary_bits(), *summary_cpu(), summary_peers()]
    if measured("moe-gpu"):
        rows.append(summary_gpu())
    if measured("hybrid-step"):
        rows.append(summary_step())
    rows += [summary_memory(), summary_demo()]
    return table(["claim", "measured", "where"], rows)


def summary_bits() -> list[object]:
    """Outputs of all exams together."""
    rows = record("bits")["results"]
    total, differ = sum(row["outputs"] for row in rows), sum(row["differ"] for row in rows)
    if measured("hybrid-bits"):
        setup = record("hybrid-bits")["setup"]
        total, differ = total + setup["outputs"], differ + setup["differing"]
    where = "CPU kernels, GPU kernels, card and CPU in one step"
    return ["the same bits wherever an expert ran", f"**{differ}** of {total:.1e} differ", where]


def summary_cpu() -> list[list[object]]:
    """One token's share of what the memory delivers, by machine."""
    rows: list[list[object]] = []
    for path in sorted(RECORDS.glob("cpu-*.json")):
        run = record(path.stem)
        row = speed(run, "moet mxint16", 1)
        where = f"{run['machine']['cpu']['model'].strip()}, {run['setup']['isa']}"
        said = f"**{row['ratio']:.2f}** of the read bandwidth ({row['gb_s']:.0f} GB/s)"
        rows.append(["one token on the CPU", said, f"{where}, {row['threads']} threads"])
    return rows


def summary_peers() -> list[object]:
    """How much faster than others on the same layer."""
    run = record("cpu-avx2")
    times = [
        f"{speed(run, who, 1)['us'] / speed(run, 'moet mxint16', 1)['us']:.1f} x as fast as {who}"
        for who in ("ggml", "kt-kernel")
    ]
    threads = speed(run, "ggml", 1)["threads"]
    return [
        "beside other CPU engines",
        ", ".join(times),
        f"one token, the same run, {threads} threads",
    ]


def summary_gpu() -> list[object]:
    """The GPU's kernels alone, at 1 and 8 tokens."""
    run = record("moe-gpu")
    ratio = {
        row["tokens"]: row["ratio"]
        for row in run["results"]
        if row["kind"] == "gpu" and row["what"] == "step" and row["shape"] == "v4-flash"
    }
    said = f"**{ratio[1]:.2f}** of the read rate at 1 token, **{ratio[8]:.2f}** at 8"
    return ["GPU kernels alone, DeepSeek-V4-Flash's layer", said, run["setup"]["card"]]


def summary_step() -> list[object]:
    """How many of the hybrid steps are within their limit."""
    run = record("hybrid-step")
    rows = [row for row in run["results"] if row["kind"] == "step"]
    held, worst = sum(row["holds"] for row in rows), max(row["ratio"] for row in rows)
    said = f"{held} of {len(rows)} splits and batches within the limit, worst at {worst:.3f} of it"
    claim = "card and CPU together: the slower of the two, not their sum"
    return [claim, said, f"{run['setup']['card']}, {run['setup']['threads']} threads"]


def summary_memory() -> list[object]:
    """What serving takes beyond engine and experts."""
    (limit,) = (row for row in record("serve-memory")["results"] if row["kind"] == "limit")
    said = f"{gigabytes(limit['beyond_experts_bytes'])} beyond engine and experts"
    return ["memory of serving", said, record("serve-memory")["setup"]["config"]]


def summary_demo() -> list[object]:
    """The demo's marks through moet."""
    training = json.loads((ROOT / "training/record.json").read_text())
    marks = training["served"]["moet"]
    least = min(marks[kind] for kind in RANGES)
    said = f"**{least:.4g} %** right, in the worst of 5 kinds of {marks['samples']} questions each"
    return [
        "the demo, inside what it was trained on",
        said,
        "held out from training; vLLM with moet",
    ]
