"""How far moet's answers are from stock engines on the same weights: measured, recorded.

    python benchmarks/against_stock.py [--model FOLDER] [--prompts N] [--tokens N]

moet answers held-out prompts of the demo greedily. The same texts are then scored, token by token,
by moet, by stock vLLM and by stock transformers, the latter two on the checkpoint with its MXFP4
experts written out as BF16 (value for value). Compared per answered token: is the most likely token
the same, and how far apart are the log-probabilities of the token that was said. Beside it, the
engine's own drift: the same engine with the same weights, scoring one text at a time or eight.

Each engine runs in a process of its own. Writes `benchmarks/records/against-stock.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks/records/against-stock.json"
ONE_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
BATCHES = (1, 8)

Text = dict[str, list[int]]
Scores = list[list[tuple[float, int]]]  # per text, per answered token: its log-prob, the argmax


# ---- the engines, each in its own process


def vllm_engine(model: str, batch: int, load_format: str) -> Any:
    """A vLLM engine that schedules at most `batch` texts at a time, without reusing their cache."""
    from vllm import LLM

    return LLM(
        model=model,
        load_format=load_format,
        max_num_seqs=batch,
        max_model_len=4096,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=512 << 20,
    )


def vllm_answers(engine: Any, prompts: list[list[int]], tokens: int) -> list[Text]:
    """Greedy answers to tokenised prompts."""
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    greedy = SamplingParams(temperature=0, max_tokens=tokens)
    outputs = engine.generate(asked, greedy, use_tqdm=False)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    return [{"prompt": p, "answer": a} for p, a in zip(prompts, answers, strict=True)]


def vllm_scores(engine: Any, texts: list[Text]) -> Scores:
    """Scores of each text's answered tokens."""
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": text["prompt"] + text["answer"]} for text in texts]
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    scores: Scores = []
    outputs = engine.generate(asked, sampling, use_tqdm=False)
    for text, output in zip(texts, outputs, strict=True):
        places = output.prompt_logprobs[len(text["prompt"]) :]
        scores.append(
            [score_of(place, said) for place, said in zip(places, text["answer"], strict=True)]
        )
    return scores


def score_of(place: dict[int, Any], said: int) -> tuple[float, int]:
    """The log-prob of the token said, and the likeliest token."""
    likeliest = next(token for token, entry in place.items() if entry.rank == 1)
    return place[said].logprob, likeliest


def transformers_scores(model: str, texts: list[Text]) -> Scores:
    """The same from stock transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    scores: Scores = []
    for text in texts:
        ids = torch.tensor([text["prompt"] + text["answer"]])
        with torch.inference_mode():
            places = stock(ids).logits[0, len(text["prompt"]) - 1 : -1].float().log_softmax(-1)
        said = places.gather(1, ids[0, len(text["prompt"]) :, None])[:, 0]
        scores.append(list(zip(said.tolist(), places.argmax(-1).tolist(), strict=True)))
    return scores


def prompts_of(model: str, count: int) -> list[list[int]]:
    """Tokenised held-out prompts, of every kind in turn."""
    from transformers import AutoTokenizer

    from moet.demo import tasks

    tokenizer = AutoTokenizer.from_pretrained(model)
    each = -(-count // len(tasks.KINDS))
    drawn = [sample for kind in tasks.KINDS for sample in tasks.heldout(kind, each, seed=20261201)]
    return [
        tokenizer.apply_chat_template(
            list(sample.messages),
            tools=list(sample.tools) or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        for sample in drawn[:: len(drawn) // count or 1][:count]
    ]


def work(job: dict[str, Any]) -> Any:
    """What a child process does."""
    if job["engine"] == "transformers":
        return transformers_scores(job["model"], job["texts"])
    load_format = "moet" if job["engine"] == "moet" else "safetensors"
    engine = vllm_engine(job["model"], job["batch"], load_format)
    if "texts" in job:
        return vllm_scores(engine, job["texts"])
    return vllm_answers(engine, prompts_of(job["model"], job["prompts"]), job["tokens"])


def in_child(**job: Any) -> Any:
    """Runs `work` in a fresh process; its result travels through a file."""
    with tempfile.TemporaryDirectory() as folder:
        asked, got = Path(folder, "job"), Path(folder, "result")
        asked.write_text(json.dumps(job))
        command = [sys.executable, __file__, "--child", str(asked), str(got)]
        subprocess.run(command, check=True, env={**os.environ, **ONE_PROCESS})
        return json.loads(got.read_text())


# ---- comparison


def compare(one: Scores, other: Scores) -> dict[str, float]:
    """Agreement of two scorings of the same texts."""
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    distances = sorted(abs(a[0] - b[0]) for a, b in pairs)
    return {
        "tokens": len(pairs),
        "same_likeliest_share": sum(a[1] == b[1] for a, b in pairs) / len(pairs),
        "logprob_distance_mean": sum(distances) / len(distances),
        "logprob_distance_p99": distances[int(0.99 * (len(distances) - 1))],
        "logprob_distance_max": distances[-1],
    }


def dequantised(model: Path, folder: str) -> str:
    """The checkpoint with its experts as BF16."""
    subprocess.run(
        [sys.executable, "-m", "training.dequantize", str(model), folder], check=True, cwd=ROOT
    )
    return folder


def measure(model: Path, prompts: int, tokens: int) -> list[dict[str, Any]]:
    """All comparisons, a row each."""
    with tempfile.TemporaryDirectory() as folder:
        plain = dequantised(model, folder)
        texts = in_child(
            engine="moet", model=str(model), batch=BATCHES[-1], prompts=prompts, tokens=tokens
        )
        moet = {b: in_child(engine="moet", model=str(model), batch=b, texts=texts) for b in BATCHES}
        vllm = {b: in_child(engine="vllm", model=plain, batch=b, texts=texts) for b in BATCHES}
        transformers = in_child(engine="transformers", model=plain, texts=texts)
    one, eight = BATCHES
    named = {
        ("moet", "stock transformers"): (moet[one], transformers),
        ("moet", "stock vLLM"): (moet[one], vllm[one]),
        ("stock vLLM", "stock transformers"): (vllm[one], transformers),
        ("moet", f"moet, batch {eight}"): (moet[one], moet[eight]),
        ("stock vLLM", f"stock vLLM, batch {eight}"): (vllm[one], vllm[eight]),
    }
    return [
        {"kind": "agreement", "one": a, "other": b, **compare(*scores)}
        for (a, b), scores in named.items()
    ]


def main() -> None:
    """Measures, records, prints a line a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, help="default: the demo checkpoint")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        job, result = asked.child
        result.write_text(json.dumps(work(json.loads(job.read_text()))))
        return
    from moet import demo
    from moet.bench.record import make_record

    model = asked.model or demo.path()
    rows = measure(model, asked.prompts, asked.tokens)
    setup = {"model": model.name, "prompts": asked.prompts, "tokens": asked.tokens}
    asked.record.write_text(make_record("against-stock", setup, rows).to_json() + "\n")
    for row in rows:
        print(
            f"{row['one']} / {row['other']}: {row['same_likeliest_share']:.2%} of {row['tokens']}"
            f" tokens the same, log-prob distance mean {row['logprob_distance_mean']:.2e},"
            f" max {row['logprob_distance_max']:.2e}"
        )


if __name__ == "__main__":
    main()
