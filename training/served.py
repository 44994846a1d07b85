"""Ask a running engine instead of the training model: python -m training.served FOLDER [SAMPLES].

Greedy chat through vLLM, marked by `correct`; FOLDER may be any export that the installed vLLM can
compute (`training.dequantize` makes one that all can).
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams

from moet.demo.tasks import KINDS, Sample, correct, heldout

GREEDY = SamplingParams(temperature=0.0, max_tokens=120, skip_special_tokens=False)
END = "<|im_end|>"


def start(folder: str) -> Any:
    """An engine of modest size."""
    return LLM(
        model=folder,
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


def main(folder: str, count: int) -> None:
    """Print the shares as JSON."""
    engine = start(folder)
    figures = {kind: share(engine, kind, count) for kind in KINDS if kind != "text"}
    print(json.dumps({"samples_per_kind": count, **figures}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100)
