"""Runs real engines, one after the other in one process: ``python drive.py JOBS RESULTS``.

A program of its own, because an engine leaves its mark on a process (environment, torch, signals).
JOBS is a JSON list of jobs, RESULTS becomes a JSON object {name: result}. Keys of a job:

    name, model      what it is called, the checkpoint
    load_format      "moet" or one of vLLM's own
    env              MOET_ settings
    eager            false: vLLM compiles
    engine           further arguments of LLM
    layers           only the MoE layers of a DeepSeek-V4 checkpoint: see v4_layer.py
    deed             something to do to the engine once its model is loaded (a key of DEEDS)
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import v4_layer

PROMPTS = ([5, 17, 33, 2, 9, 250, 77, 140], [100, 200, 300], [7] * 40)
BASE_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "moet",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def one_layer_is_taken_over(model: Any) -> None:
    """What another plugin might do."""
    layer = model.model.layers[1].mlp.experts.routed_experts
    layer.quant_method.apply = lambda layer, x, topk_weights, topk_ids, **_: x


def weights_are_reloaded(model: Any) -> None:
    """What trainers do to an engine that keeps running."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    get_model_loader(LoadConfig(load_format="moet")).load_weights(model, None)


def an_expert_reaches_torch(model: Any) -> None:
    """What a hole in the name map would do."""
    name = "model.layers.0.mlp.experts.3.gate_proj.weight_packed"
    model.load_weights([(name, model.lm_head.weight)])


DEEDS = {
    "takeover": one_layer_is_taken_over,
    "reload": weights_are_reloaded,
    "stray": an_expert_reaches_torch,
}


class Recorder:
    """Keeps what goes into moet's layers and comes out, and has the reference judge it after."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        from moet.engine.live import LiveLayer
        from moet.hybrid.reference import at
        from moet.kernels.spec import DType

        plain = LiveLayer.run

        def run(live: Any, **raw: Any) -> None:
            spec, tokens = live.experts.spec, raw["tokens"]
            kind = "u4" if raw["dtype"] is DType.F32 else "u2"
            x = at(raw["x"], (tokens, spec.hidden), kind).copy()
            ids = at(raw["ids"], (tokens, spec.top_k), "i4").copy()
            weights = at(raw["weights"], (tokens, spec.top_k), "f4").copy()
            plain(live, **raw)
            out = at(raw["out"], (tokens, spec.hidden), kind).copy()
            self.calls.append((live.experts, raw["dtype"], x, ids, weights, out))

        with mock.patch.object(LiveLayer, "run", run):
            yield

    def judge(self) -> dict[str, int]:
        """Compares calls of up to 64 tokens, 20 at most, with the reference."""
        import numpy as np

        from moet.hybrid.reference import ReferenceExperts

        outputs = differ = 0
        short = [call for call in self.calls if len(call[2]) <= 64]
        for computer, dtype, x, ids, weights, out in short[:: max(1, len(short) // 20)]:
            twin, again = ReferenceExperts(computer.spec), np.empty_like(out)
            twin.bind(computer._leases.values())
            twin.run(
                x=x.ctypes.data,
                dtype=dtype,
                tokens=len(x),
                weights=weights.ctypes.data,
                ids=ids.ctypes.data,
                out=again.ctypes.data,
            )
            outputs += out.size
            differ += int((out != again).sum())
        return {"calls": len(self.calls), "outputs": outputs, "differ": differ}


@contextmanager
def counting_reads(names: list[str]) -> Iterator[None]:
    """Notes the name of every tensor that somebody takes out of a safetensors file."""
    import safetensors

    plain = safetensors.safe_open

    class Counted:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._file = plain(*args, **kwargs)

        def __enter__(self) -> Counted:
            self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> Any:
            return self._file.__exit__(*error)

        def get_tensor(self, name: str) -> Any:
            names.append(name)
            return self._file.get_tensor(name)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    with mock.patch.object(safetensors, "safe_open", Counted):
        yield


def describe(model: Any) -> dict[str, Any]:
    """What became of the MoE layers of a torch model."""
    routed = [m for n, m in model.named_modules() if n.endswith("routed_experts")]
    live = [layer.moet_layer for layer in routed if hasattr(layer, "moet_layer")]
    return {
        "classes": sorted({type(layer).__name__ for layer in routed}),
        "expert_parameters": sum(p.numel() for layer in routed for p in layer.parameters()),
        "calls": [layer.calls for layer in live],
        "ran_isa": [getattr(layer.experts, "ran_isa", None) for layer in live],
    }


def generate(llm: Any) -> dict[str, Any]:
    """Tokens and log-probs, greedy."""
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0,
        detokenize=False,
    )  # fmt: skip
    prompts = [TokensPrompt(prompt_token_ids=list(ids)) for ids in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    told = [[next(iter(p.values())).logprob for p in o.prompt_logprobs if p] for o in outputs]
    answers = [o.outputs[0] for o in outputs]
    said = [[next(iter(p.values())).logprob for p in answer.logprobs] for answer in answers]
    tokens = [list(answer.token_ids) for answer in answers]
    return {"tokens": tokens, "prompt_logprobs": told, "logprobs": said}


def tell(error: BaseException) -> dict[str, Any]:
    notes = list(getattr(error, "__notes__", []))
    return {"type": type(error).__name__, "message": str(error), "notes": notes}


def work(job: dict[str, Any], result: dict[str, Any]) -> None:
    """Starts one engine and has it generate."""
    from vllm import LLM

    recorder = Recorder()
    result["read"] = []
    with recorder.listening(), counting_reads(result["read"]):
        llm = LLM(
            model=job["model"],
            load_format=job["load_format"],
            enforce_eager=job.get("eager", True),
            skip_tokenizer_init=True,
            max_model_len=256,
            max_num_seqs=4,
            kv_cache_memory_bytes=64 << 20,
            **job.get("engine", {}),
        )
        if "deed" in job:
            llm.apply_model(DEEDS[job["deed"]])
        result |= generate(llm)
    if job.get("engine", {}).get("tensor_parallel_size", 1) > 1:
        return  # its layers are in other processes
    result |= llm.apply_model(describe)[0]
    if job["load_format"] == "moet" and job.get("judge", False):
        result["judged"] = recorder.judge()


def layers_left() -> int:
    """Layers of ended engines that something still keeps, with all their experts."""
    op = sys.modules.get("moet.engine.op")
    return len(op._LAYERS) if op else 0


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One job with its environment; what it raises becomes its result."""
    import torch
    from vllm.distributed import cleanup_dist_env_and_memory

    result: dict[str, Any] = {}
    torch._dynamo.config.disable = job.get("eager", True)
    start = time.monotonic()
    with mock.patch.dict(os.environ, job.get("env", {})):
        try:
            if job.get("layers"):
                result |= v4_layer.run(job["model"], Path(job["model"]).with_name("rendezvous"))
            else:
                work(job, result)
        except Exception as error:
            result["error"] = tell(error)
    result["seconds"] = time.monotonic() - start
    cleanup_dist_env_and_memory()
    gc.collect()
    result["layers_left"] = layers_left()
    return result


def main(jobs: Path, results: Path) -> None:
    os.environ.update(BASE_ENV)
    from moet.engine.plugin import register

    register()
    register()  # as vLLM does, in every process and sometimes twice
    done = {job["name"]: run(job) for job in json.loads(jobs.read_text())}
    results.write_text(json.dumps(done))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
