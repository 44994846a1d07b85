"""Ask a running engine: python -m training.served FOLDER [SAMPLES [LOAD_FORMAT]].

Greedy chat through vLLM, marked by `correct`. Stock vLLM (load format auto) computes any export of
`training.dequantize`; with load format moet it computes the MXFP4 files. Figures go to the record.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import vllm
from vllm import LLM, SamplingParams

from moet.demo.tasks import KINDS, Sample, correct, heldout
from training.export import write_json
from training.render import RECORD

GREEDY = SamplingParams(temperature=0.0, max_tokens=120, skip_special_tokens=False)
END = "<|im_end|>"


def start(folder: str, load_format: str) -> Any:
    """An engine of modest size."""
    return LLM(
        model=folder,
        load_format=load_format,
        max_model_len=4096,
        max_num_seqs=8,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,
        enable_prefix_caching=False,
    )


def ask(engine: Any, sample: Sample) -> str:
    """One reply."""
    tools = list(sample.tools) or None
    out = engine.chat(list(sample.messages), GREEDY, tools=tools, use_tqdm=False)
    text: str = out[0].outputs[0].text
    return text.removesuffix(END)


def share(engine: Any, kind: str, count: int) -> float:
    """Percent right of a kind."""
    samples = heldout(kind, count, 100)
    return round(100 * sum(correct(s, ask(engine, s)) for s in samples) / count, 1)


def note(load_format: str, served: dict[str, Any]) -> None:
    """Into the record, and to the screen."""
    record = json.loads(RECORD.read_text("utf-8"))
    write_json(RECORD, {**record, "served": {**record.get("served", {}), load_format: served}})
    print(json.dumps(served))


def main(folder: str, count: int = 100, load_format: str = "auto") -> None:
    """Ask, mark, note."""
    engine = start(folder, load_format)
    figures = {kind: share(engine, kind, count) for kind in KINDS if kind != "text"}
    note(load_format, {"vllm": vllm.__version__, "samples": count, **figures})


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]), *sys.argv[3:])
