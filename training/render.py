"""Write the record's figures into README.md: python -m training.render [--check]."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORD, README = HERE / "record.json", HERE / "README.md"
BEGIN, END = "<!-- record -->\n", "<!-- /record -->\n"


def table(title: str, rows: dict[str, Any]) -> Iterator[str]:
    """Two columns."""
    yield f"| {title} | |"
    yield "|---|---|"
    yield from (f"| {k} | {v} |" for k, v in rows.items())
    yield ""


def run_rows(r: dict[str, Any]) -> dict[str, Any]:
    """How it was trained."""
    rate = r["tokens"] / r["train_seconds"] / 1e6
    return {
        "machine": f"{r['machine']}, torch {r['torch']}",
        "commit": r["commit"][:12],
        "training, start to last step": f"{r['train_seconds']:.0f} s",
        "with export and evaluation": f"{r['wall_seconds']:.0f} s",
        "steps": f"{r['steps']:,}",
        "tokens": f"{r['tokens'] / 1e6:,.0f} M ({rate:.1f} M a second)",
    }


def held_rows(r: dict[str, Any]) -> dict[str, Any]:
    """Held-out figures of the MXFP4 files."""
    h = r["heldout"]
    exact = {k: f"{h[k]} %" for k in h if isinstance(h[k], float) and k != "text_perplexity"}
    return {**exact, "perplexity of stories": h["text_perplexity"]}


LOADED = {"auto": "BF16 export, stock", "moet": "MXFP4 files, moet"}


def served_rows(r: dict[str, Any]) -> dict[str, Any]:
    """Marked replies of engines."""

    def told(served: dict[str, Any]) -> str:
        return ", ".join(f"{k} {v} %" for k, v in served.items() if isinstance(v, float))

    return {
        f"{LOADED[k]} (vLLM {v['vllm']}, {v['samples']} of each)": told(v)
        for k, v in r.get("served", {}).items()
    }


def usage_rows(r: dict[str, Any]) -> dict[str, Any]:
    """Expert use a layer."""
    u = r["expert_usage"]["mixture"]
    return {
        f"layer {i}": f"busiest fifth {a} %, busiest {b} %, idlest {c} %"
        for i, (a, b, c) in enumerate(
            zip(u["busiest_fifth"], u["busiest"], u["idlest"], strict=True)
        )
    }


def kind_rows(r: dict[str, Any]) -> dict[str, Any]:
    """What the busiest fifth of the experts serves, a kind of task, averaged over layers."""
    kinds = r["expert_usage"]["by_kind"]
    fifths = {k: u["busiest_fifth"] for k, u in kinds.items()}
    return {k: f"{sum(v) / len(v):.0f} %" for k, v in fifths.items()}


def render(record: dict[str, Any]) -> str:
    """The tables."""
    detail = record["heldout"]["recall_detail"]
    lines = [
        *table("the run", run_rows(record)),
        *table("held out, word for word, greedy", held_rows(record)),
        *table("greedy chat through an engine, marked", served_rows(record)),
        *table("recall by prompt tokens", {k: f"{v} %" for k, v in detail["by_length"].items()}),
        *table("recall by depth", {k: f"{v} %" for k, v in detail["by_depth"].items()}),
        *table("routings, whole mixture", usage_rows(record)),
        *table("routings of one kind that its busiest fifth serves", kind_rows(record)),
    ]
    return "\n".join(lines)


def replaced(readme: str, tables: str) -> str:
    """The README with fresh tables between its marks."""
    head, rest = readme.split(BEGIN)
    return head + BEGIN + tables + END + rest.split(END)[1]


def main() -> int:
    """Rewrite, or with --check only compare."""
    old = README.read_text("utf-8")
    new = replaced(old, render(json.loads(RECORD.read_text("utf-8"))))
    if "--check" in sys.argv:
        return int(new != old)
    README.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
