"""Renders numbers from benchmark records into the documents: `python scripts/render.py [--check]`.

Between `<!-- render NAME -->` and `<!-- /render -->` in README.md and under docs/ is what NAME's
function below makes of `benchmarks/records/`. With --check nothing is written; the exit status is 1
where a document does not say what the records say.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable

from records import RANGES, RECORDS, ROOT, Row, gigabytes, measured, record, table
from summary import summary

DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
UNMEASURED = "*unmeasured*"


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
        [what, *(f"{marks[kind]:.4g} %" for marks in (trained, stock, moet))]
        for kind, what in RANGES.items()
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
    name = "moe-gpu" if measured("moe-gpu") else "gpu-h200"
    run = record(name)
    rows = [
        [
            run["setup"].get("card") or run["machine"]["gpu"],
            row["shape"],
            row["tokens"],
            f"{row['us']:.1f} us",
            f"{row['read_gb_s']:.0f}",
            f"**{row['ratio']:.2f}**",
        ]
        for row in run["results"]
        if row["kind"] == "gpu" and row["what"] == "step" and row["tokens"] in {1, 4, 8, 64}
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


def replay() -> str:
    """What each policy of the cascade finds in memory, by budget."""
    rows = record("replay")["results"]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    hits = {
        (row["budget"], row["policy"]): f"{row['hit_rate']:.1%} ({row['prefill_hit_rate']:.1%})"
        for row in rows
    }
    budgets = dict.fromkeys(row["budget"] for row in rows)
    return table(
        ["in memory", *policies],
        [[f"{budget:.0%}", *(hits[budget, name] for name in policies)] for budget in budgets],
    )


def host(run: Row) -> str:
    """The machine of a record of card and CPU."""
    cpu = run["machine"]["cpu"]["model"].strip()
    return f"{run['setup']['card']}, {cpu}, {run['setup']['threads']} threads"


def hybrid_bits() -> str:
    """What the exams on a card have compared."""
    if not measured("hybrid-bits"):
        return UNMEASURED
    run = record("hybrid-bits")
    rows = [
        [
            {"kernels": "kernels alone", "hybrid": "card and CPU"}[row["kind"]],
            row["name"],
            row.get("variant", ""),
            row.get("splits", ""),
            row.get("uploads", ""),
            f"{row['outputs']:,}",
            row["differing"],
        ]
        for row in run["results"]
        if row["kind"] in {"kernels", "hybrid"}
    ]
    head = ["what", "layers", "waits by", "splits", "uploads beside", "outputs compared", "differ"]
    setup = run["setup"]
    line = f"{setup['outputs']:,} outputs in all, {setup['differing']:,} differ; {host(run)}."
    return table(head, rows) + "\n\n" + line


def faults() -> str:
    """What faults that were made on purpose have done."""
    rows = record("hybrid-bits")["results"] if measured("hybrid-bits") else []
    made = [row for row in rows if row["kind"] == "fault"]
    if not made:
        return UNMEASURED
    head = ["fault", "waits by", "after", "error", "verdict"]
    return table(
        head,
        [
            [
                row["fault"],
                row["variant"],
                f"{row['seconds']:.2f} s",
                row["said"] or "none: waited for",
                f"**{row['wrong']}**" if row["wrong"] else "as it must be",
            ]
            for row in made
        ],
    )


def step_rows(row: Row) -> list[object]:
    """A row of the step's tables, from the share on the card on."""
    times = ("step", "step_p95", "one_at_a_time", "card", "cpu", "wait", "round_trip",
             "cpu_in_round_trip", "limit")  # fmt: skip
    return [
        f"{row['percent']} %",
        row["tokens"],
        *(f"{row[f'{name}_us']:.0f}" for name in times),
        f"**{row['ratio']:.2f}**" if row["holds"] else f"{row['ratio']:.3f}, **over the limit**",
        f"{row['cpu_read_share']:.0%}",
        f"{row['card_read_share']:.0%}",
        f"{row['extrapolated_ms']:.1f} ms",
    ]


STEP_HEAD = [
    "routings on card", "tokens", "step us", "p95", "one at a time", "card", "CPU", "wait",
    "round trip", "CPU in it", "limit", "ratio", "CPU read", "card read", "40 layers, extrapolated",
]  # fmt: skip


def step_caption(run: Row) -> str:
    """What was measured and where."""
    setup, (reads,) = run["setup"], [row for row in run["results"] if row["kind"] == "read"]
    cores = f" of {setup['cores']} cores" if "cores" in setup else ""
    once = "cpu_read_gb_s" in reads
    cpu = f"{reads['cpu_read_gb_s']:.0f} GB/s, once" if once else "in turns with each row"
    return (
        f"{host(run)}{cores}; hidden {setup['hidden']}, intermediate {setup['intermediate']}, "
        f"{setup['experts']} experts a layer, top-{setup['top_k']}, {setup['layers']} layers, "
        f"{setup['distinct_experts']} distinct experts; read rates: card "
        f"{reads['card_read_gb_s']:.0f} GB/s, CPU {cpu}; "
        f"{setup['replays']} replays a figure."
    )


def step_over(run: Row) -> str:
    """The rows over the limit, named."""
    rows = [row for row in run["results"] if row["kind"] == "step"]
    over = [
        f"{row['variant']}, {row['percent']} %, {row['tokens']} token{'s'[: row['tokens'] > 1]} "
        f"(by {row['step_us'] - row['limit_us']:.1f} us)"
        for row in rows
        if not row["holds"]
    ]
    return f"{len(over)} of {len(rows)} rows over the limit{': ' * bool(over)}{'; '.join(over)}."


def step_table(run: Row, head: list[str], rows: list[list[object]]) -> str:
    """A table of steps between what was measured and which rows are over the limit."""
    return "\n\n".join([step_caption(run), table(head, rows), step_over(run)])


def step() -> str:
    """Hybrid steps by share and tokens."""
    if not measured("hybrid-step"):
        return UNMEASURED
    run = record("hybrid-step")
    rows = [step_rows(row) for row in run["results"] if row["kind"] == "step"]
    return step_table(run, STEP_HEAD, rows)


def step_variants() -> str:
    """The ways to wait, side by side."""
    if not measured("hybrid-step-variants"):
        return UNMEASURED
    run = record("hybrid-step-variants")
    rows = [[row["variant"], *step_rows(row)] for row in run["results"] if row["kind"] == "step"]
    return step_table(run, ["waits by", *STEP_HEAD], rows)


def kernels() -> str:
    """Launches of the kernels, their registers, and others on the same card."""
    if not measured("moe-gpu"):
        return UNMEASURED
    run = record("moe-gpu")
    rows = [
        [
            row["shape"],
            row["tokens"],
            row["what"],
            f"{row['us']:.1f} us",
            f"{row['bytes'] / row['us'] / 1e3:.0f}" if row["bytes"] else "",
            f"**{row['ratio']:.2f}**" if row["bytes"] else "",
        ]
        for row in run["results"]
        if row["kind"] == "gpu"
    ]
    parts = [table(["layer", "tokens", "what", "time", "GB/s", "of the read rate"], rows)]
    registers = [
        [f"`{row['name']}`", row["registers"]] for row in run["results"] if row["kind"] == "kernel"
    ]
    parts.append(table(["kernel", "registers a thread"], registers))
    others = [
        [
            row["shape"],
            row["who"],
            row["tokens"],
            f"{row['us']:.1f} us",
            f"{row['moet_us']:.1f} us",
            f"**{row['times_as_fast']:.2f} x**",
        ]
        for row in run["results"]
        if row["kind"] == "other"
    ]
    if others:
        parts.append(table(["layer", "who", "tokens", "theirs", "moet", "moet is"], others))
    return "\n\n".join(parts)


BLOCKS: dict[str, Callable[[], str]] = {
    "summary": summary,
    "cpu": cpu,
    "gpu": gpu,
    "demo": demo,
    "bits": bits,
    "memory": memory,
    "hybrid_bits": hybrid_bits,
    "faults": faults,
    "step": step,
    "step_variants": step_variants,
    "kernels": kernels,
    "replay": replay,
}


def rendered(text: str) -> str:
    """A document with all its blocks made anew."""

    def block(match: re.Match[str]) -> str:
        return f"<!-- render {match[1]} -->\n{BLOCKS[match[1]]()}\n<!-- /render -->"

    return re.sub(r"<!-- render (\w+) -->\n.*?<!-- /render -->", block, text, flags=re.DOTALL)


def main() -> int:
    """Writes the documents, or checks them."""
    stale = [path for path in DOCUMENTS if rendered(path.read_text()) != path.read_text()]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.name} does not say what the records say: run scripts/render.py")
        return int(bool(stale))
    for path in stale:
        path.write_text(rendered(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
