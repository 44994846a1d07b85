"""moet inside a real vLLM: what comes out, what is read, what is refused, and who notices."""

from __future__ import annotations

import numpy as np
import pytest

from moet.checkpoint import open_checkpoint
from moet.engine.heartbeat import Page, Phase
from moet.kernels.cpu import isa_available

from .conftest import Runs

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),  # the first test waits for every engine
    pytest.mark.filterwarnings("ignore"),
]

SAID = ("tokens", "logprobs", "prompt_logprobs")


def said(runs: Runs, name: str) -> dict[str, object]:
    return {key: runs[name][key] for key in SAID}


def flat(runs: Runs, name: str) -> np.ndarray:
    return np.concatenate([np.array(row) for row in runs[name]["prompt_logprobs"]])


def test_threads_change_no_bit(runs: Runs) -> None:
    for threads in (1, 2, 3):
        assert said(runs, f"threads {threads}") == said(runs, "plain")


@pytest.mark.parametrize("isa", isa_available())
def test_instruction_sets_change_no_bit(runs: Runs, isa: str) -> None:
    assert said(runs, f"isa {isa}") == said(runs, "plain")
    assert set(runs[f"isa {isa}"]["ran_isa"]) == {isa}


def test_the_reference_serves_the_same_bits(runs: Runs) -> None:
    assert said(runs, "reference") == said(runs, "plain")
    assert said(runs, "gpt-oss reference") == said(runs, "gpt-oss")
    assert set(runs["reference"]["ran_isa"]) == {None}


def test_close_to_stock_on_the_dequantised_weights(runs: Runs) -> None:
    """Stock rounds h and every product to bf16; moet keeps 16 bits of each activation."""
    ours, stock = flat(runs, "plain"), flat(runs, "stock")
    assert np.abs(ours).min() < np.abs(ours).max()
    assert np.abs(ours - stock).mean() < 0.03
    assert np.abs(ours - stock).max() < 0.2


@pytest.mark.parametrize("name", ["plain", "compiled", "fp32", "fp16", "gpt-oss"])
def test_the_layers_give_what_the_reference_gives(runs: Runs, name: str) -> None:
    """Inputs and outputs recorded in the engine, eager and compiled, judged after the fact."""
    judged = runs[name]["judged"]
    assert judged["calls"] >= 24
    assert judged["outputs"] > 1000
    assert judged["differ"] == 0


def test_the_layers_of_deepseek_v4(runs: Runs) -> None:
    """V4's quantisation config keeps its linears; its experts are moet's, with 8-bit activations,
    and the scale is applied before the one rounding."""
    layers = runs["v4 layers"]
    assert layers["quantisation"] == "DeepseekV4FP8Config"
    assert (layers["act"], layers["limit"], layers["scale"]) == ("MXINT8", 10.0, 1.5)
    assert layers["left_to_runner"] == 1.0
    assert layers["parameters"] == ["e_score_correction_bias"], "the router's, not an expert's"
    for judged in layers["judged"]:
        assert judged["differ"] == 0
        assert judged["distinct"] > judged["outputs"] // 4


def test_no_expert_is_ever_a_torch_tensor(runs: Runs) -> None:
    for name, family in (("plain", "qwen3_moe"), ("gpt-oss", "gpt_oss")):
        checkpoint = open_checkpoint(runs.root / family)
        experts = checkpoint.routed_expert_names()
        assert len(experts) >= 8
        assert sorted(runs[name]["read"]) == sorted(set(checkpoint.tensors) - experts)
        assert runs[name]["expert_parameters"] == 0
        assert [c for c in runs[name]["classes"] if not c.startswith("Moet")] == []


def test_other_load_formats_are_left_alone(runs: Runs) -> None:
    """In a process in which moet has served before, and after."""
    assert runs["stock"]["classes"] == ["RoutedExperts"]
    assert runs["stock"]["expert_parameters"] > 0
    assert runs["stock"]["calls"] == []


def test_experts_leave_with_their_engine(runs: Runs) -> None:
    for name in ("plain", "threads 2", "reference", "fp16", "gpt-oss"):
        assert runs[name]["layers_left"] == 0


def test_all_layers_ran(runs: Runs) -> None:
    for name in ("plain", "compiled", "reference"):
        calls = runs[name]["calls"]
        assert len(calls) == 2
        assert calls[0] == calls[1] >= 12


def test_a_layer_that_is_not_moets_ends_the_engine(runs: Runs) -> None:
    error = runs.error("takeover")
    assert error["type"] == "EngineError"
    assert "without moet's experts in model.layers.1.mlp.experts" in error["message"]
    page = Page.open(runs.root / "idle")
    assert page.phase is Phase.FAILED
    assert "model.layers.1.mlp.experts" in str(page.failure)


def test_the_worker_beats_for_the_watchdog(runs: Runs) -> None:
    page = Page.open(runs.root / "beat")
    done, total = page.rank(0).loaded
    assert page.rank(0).pid > 0
    assert page.beats >= 2 * sum(runs["plain"]["calls"])
    assert done == total == open_checkpoint(runs.root / "qwen3_moe").expert_bytes
    assert Page.open(runs.root / "slow beat").beats >= sum(runs["reference"]["calls"])


MESSAGES = {
    "lora": ("UnsupportedError", "LoRA"),
    "expert parallel": ("UnsupportedError", "expert parallelism"),
    "backend": ("UnsupportedError", "--moe-backend triton"),
    "setting": ("UsageError", "unknown setting additional_config.moet.arithmetics"),
    "value": ("UsageError", "numpy"),
    "isa": ("KernelError", "neon"),
    "experts": ("BrokenCheckpoint", "BF16"),
    "norm": ("CheckpointError", "model.layers.0.input_layernorm.weight"),
    "query": ("CheckpointError", "parts of model.layers.1.self_attn.qkv_proj.weight are missing"),
    "reload": ("UnsupportedError", "reloaded in place"),
    "stray": ("EngineError", "model.layers.0.mlp.experts.3.gate_proj.weight_packed into torch"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_is_not_covered_is_refused_by_name(runs: Runs, name: str) -> None:
    error = runs.error(f"refused {name}")
    kind, part = MESSAGES[name]
    assert error["type"] == kind
    assert part in error["message"]
    assert error["notes"][0].startswith("hint: ")


def test_a_refusal_reaches_the_supervisor(runs: Runs) -> None:
    page = Page.open(runs.root / "sad")
    assert "neon" in str(page.failure)
    assert page.failure is not None
    assert page.failure.hint
