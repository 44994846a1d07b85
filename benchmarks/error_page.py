"""The page docs/numerics-errors.md, from the record that `error_tables.py` writes."""

from __future__ import annotations

from typing import Any

CHAPTERS = {
    "signals": (
        "Synthetic signals: SQNR in dB, higher is better",
        "1 M values each, rounded to bf16 first, so bf16 itself has no error. An outlier is one "
        "element a block of the stated size (+-20 %); a line for the whole, one for the rest.",
    ),
    "outliers": (
        "The 31 values beside an outlier: SQNR in dB, by its size in sigma",
        "Where MXINT8 is the smaller, the outlier has taken the resolution of its neighbours.",
    ),
    "zeros": (
        "Elements that become zero",
        "Share of the nonzero elements.",
    ),
    "experts": (
        "A whole expert: relative error, lower is better",
        "Hidden 4096, intermediate 2048, SwiGLU with limit 10, random MXFP4 weights, 16 tokens; "
        "both x and h in the format, everything else in fp64, the truth on the same bf16 inputs.",
    ),
    "contract": (
        "The same, as moet computes it: relative error of an expert's rows",
        "Gaussian inputs. Formats alone: everything else in fp64. The whole contract: "
        "`kernels.reference`, with its fp32 sums, its exp and its rows.",
    ),
    "rows": (
        "Rows: relative error of the bf16 output of 6 slots",
        "What rounding each expert's row to bf16 before the combine adds to the final rounding.",
    ),
    "recorded": (
        "Recorded activations: SQNR in dB",
        "{model}, {tokens} tokens and {routings} routings a layer, from held-out dialogues by "
        "`benchmarks/record_activations.py`. x: inputs of the experts of a layer (bf16, where the "
        "model computes in it); h: their middle in fp32. The last column is a share of blocks.",
    ),
    "model": (
        "The recorded model's own experts: relative error",
        "Mean over experts of the layer, on the recorded inputs; as above, fp64 elsewhere.",
    ),
}


def cell(value: float | None, column: str, chapter: str) -> str:
    """One number as text: dB with one decimal, errors with three digits."""
    if value is None:
        return "exact"
    if column.startswith("blocks") or chapter == "zeros":
        return f"{100 * value:.2f} %"
    return f"{value:.1f}" if chapter in ("signals", "outliers", "recorded") else f"{value:.2e}"


def render(record: dict[str, Any]) -> str:
    """The page as markdown."""
    machine, recorded = record["machine"], record.get("recorded", {})
    lines = [
        "# Errors of quantised activations",
        "",
        "Rendered by `benchmarks/error_tables.py` from `benchmarks/records/numerics-errors.json`; "
        "not edited by hand.",
        f"Seed {record['seed']}, commit {record['commit'] or 'unknown'}, {machine['cpu']}, "
        f"numpy {machine['numpy']}. The formats are defined in [numerics.md](numerics.md), the "
        "others in `benchmarks/activation_formats.py`:",
        'MXFP8 "ceil" takes the smallest scale that does not saturate, "floor" is OCP\'s rule; '
        "FP8/128 and INT8/128 have one fp32 scale for 128 values.",
    ]
    for chapter, table in record["tables"].items():
        title, note = CHAPTERS[chapter]
        columns = list(next(iter(table.values())))
        lines += [
            "",
            f"## {title}",
            "",
            note.format(**recorded),
            "",
            "| | " + " | ".join(columns) + " |",
        ]
        lines.append("|---" * (len(columns) + 1) + "|")
        for name, row in table.items():
            cells = (cell(row[c], c, chapter) for c in columns)
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
