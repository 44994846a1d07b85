"""Renders numbers from benchmark records into the documents: `python scripts/render.py [--check]`.

Between `<!-- render NAME -->` and `<!-- /render -->` in README.md stands what NAME's function below
makes of `benchmarks/records/`. With --check nothing is written; the exit status is 1 where a
document does not say what the records say.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks/records"
DOCUMENT = ROOT / "README.md"

Row = dict[str, Any]


def record(name: str) -> Row:
    """A record by its file's name."""
    loaded: Row = json.loads((RECORDS / f"{name}.json").read_text())
    return loaded


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A markdown table; numbers to the right."""
    names = list(head)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def cpu_rows(name: str) -> list[list[object]]:
    """The speed rows of a CPU record, one a count of tokens, at one thread and at all of them."""
    run = record(name)
    most = max(row["threads"] for row in run["results"] if row["kind"] == "speed")
    where = f"{run['machine']['cpu']['model'].strip()}, {run['setup']['isa']}"
    return [
        [
            where,
            row["threads"],
            row["tokens"],
            row["who"].split()[-1].upper(),
            f"{row['us'] / 1e3:.2f} ms",
            f"{row['gb_s']:.1f}",
            f"{row['read_gb_s']:.1f}",
            f"**{row['ratio']:.2f}**",
        ]
        for row in run["results"]
        if row["kind"] == "speed"
        and row["who"].startswith("moet")
        and row["threads"] in {1, most}
        and row["tokens"] in {1, 8, 64}
    ]


def cpu() -> str:
    """Speed of the layer on each recorded machine, then company and peers where recorded."""
    names = sorted(path.stem for path in RECORDS.glob("cpu-*.json"))
    head = ["machine", "threads", "tokens", "activations", "a step", "GB/s", "read GB/s", "ratio"]
    parts = [table(head, [row for name in names for row in cpu_rows(name)])]
    parts += [text for name in names if (text := busy(name))]
    parts += [text for name in names if (text := peers(name))]
    return "\n\n".join(parts)


def busy(name: str) -> str:
    """One token beside busy processes."""
    run = record(name)
    rows = [row for row in run["results"] if row["kind"] == "busy"]
    if not rows:
        return ""
    head = ["beside busy processes", "threads", "who", "median", "p95", "slower (median, p95)"]
    return table(
        head,
        [
            [
                row["processes"],
                row["threads"],
                row["who"],
                f"{row['busy_median_us'] / 1e3:.2f} ms",
                f"{row['busy_p95_us'] / 1e3:.2f} ms",
                f"{row['median_slowdown']:.1f} x, {row['p95_slowdown']:.1f} x",
            ]
            for row in rows
        ],
    )


def peers(name: str) -> str:
    """Other engines on the same layer, in turns with moet."""
    run = record(name)
    others = {row["who"] for row in run["results"] if row["kind"] == "peer" and row["same_layer"]}
    rows = [
        row
        for row in run["results"]
        if row["kind"] == "speed" and row["who"] in others and row["tokens"] in {1, 8, 64}
    ]
    if not rows:
        return ""
    head = ["peer, same layer, same run", "threads", "tokens", "a step", "GB/s", "ratio"]
    return table(
        head,
        [
            [
                row["who"],
                row["threads"],
                row["tokens"],
                f"{row['us'] / 1e3:.2f} ms",
                f"{row['gb_s']:.1f}",
                f"{row['ratio']:.2f}",
            ]
            for row in rows
        ],
    )


def demo() -> str:
    """Quality of the demo, and its agreement with stock engines."""
    training = json.loads((ROOT / "training/record.json").read_text())
    trained, stock, moet = (
        training["heldout"],
        training["served"]["auto"],
        training["served"]["moet"],
    )
    quality = [
        [kind, *(f"{marks[kind]:.4g} %" for marks in (trained, stock, moet))]
        for kind in ("addition", "subtraction", "multiplication", "recall", "json")
    ]
    agreement = [
        [
            f"{row['one']} and {row['other']}",
            f"{row['same_likeliest_share']:.2%} of {row['tokens']}",
            f"{row['logprob_distance_mean']:.1e}",
            f"{row['logprob_distance_max']:.1e}",
        ]
        for row in record("against-stock")["results"]
    ]
    marks = [
        "held out, right",
        f"in training's own code, {trained['samples_per_kind']} each",
        f"stock vLLM, experts as BF16, {stock['samples']} each",
        f"vLLM with moet, MXFP4, {moet['samples']} each",
    ]
    head = ["answered tokens", "likeliest token the same", "log-prob distance, mean", "max"]
    return table(marks, quality) + "\n\n" + table(head, agreement)


def bits() -> str:
    """Outputs compared, and how many differed."""
    rows = [
        [row["what"], row["where"], f"{row['outputs']:.2e}", row["differ"]]
        for row in record("bits")["results"]
    ]
    return table(["what", "where", "outputs compared", "differ"], rows)


def gpu() -> str:
    """A step of the GPU's decode kernels, by tokens."""
    run = record("gpu-h200")
    rows = [
        [
            run["machine"]["gpu"],
            row["shape"],
            row["tokens"],
            f"{row['us']:.1f} us",
            f"{row['read_gb_s']:.0f}",
            f"**{row['ratio']:.2f}**",
        ]
        for row in run["results"]
        if row["what"] == "step" and row["tokens"] in {1, 4, 8, 64}
    ]
    return table(["card", "layer", "tokens", "a step", "read GB/s", "ratio"], rows)


def memory() -> str:
    """Peak memory of serving, with experts and with next to none, and the limit."""
    run = record("serve-memory")
    setup, (limit,) = run["setup"], [row for row in run["results"] if row["kind"] == "limit"]
    sizes = ("expert", "loading_total", "answering_total", "peak")
    rows = [
        [row["who"], *(gigabytes(row[f"{size}_bytes"]) for size in sizes)]
        for row in run["results"]
        if row["kind"] == "run"
    ]
    layers = f"{setup['layers'] or 'all'} layers"
    head = [f"{setup['config']}, {layers}", "experts in the files", "loading", "answering", "peak"]
    verdict = "within" if limit["holds"] else "**more than**"
    line = (
        f"{gigabytes(limit['peak_bytes'])} is {verdict} the limit of "
        f"{gigabytes(limit['limit_bytes'])} (zero experts, {setup['allowed']} x the bytes of the "
        f"experts, {gigabytes(setup['spare_bytes'])}); beyond engine and experts it is "
        f"{gigabytes(limit['beyond_experts_bytes'])}."
    )
    return table(head, rows) + "\n\n" + line


def gigabytes(count: int) -> str:
    """Decimal, two places."""
    return f"{count / 1e9:.2f} GB"


BLOCKS: dict[str, Callable[[], str]] = {
    "cpu": cpu,
    "gpu": gpu,
    "demo": demo,
    "bits": bits,
    "memory": memory,
}


def rendered(text: str) -> str:
    """A document with all its blocks made anew."""

    def block(match: re.Match[str]) -> str:
        return f"<!-- render {match[1]} -->\n{BLOCKS[match[1]]()}\n<!-- /render -->"

    return re.sub(r"<!-- render (\w+) -->\n.*?<!-- /render -->", block, text, flags=re.DOTALL)


def main() -> int:
    """Writes the document, or checks it."""
    text = DOCUMENT.read_text()
    fresh = rendered(text)
    if "--check" in sys.argv[1:]:
        if fresh != text:
            print("README.md does not say what the records say: run scripts/render.py")
        return int(fresh != text)
    DOCUMENT.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
