"""The recorder of activations: what it takes is what the model's own experts work on."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from moet.kernels.rounding import widen_bf16

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TOKENS, TOP_K, HIDDEN, INTERMEDIATE = 6, 2, 64, 32


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import record_activations

    return record_activations


@pytest.fixture
def model() -> torch.nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=64,
        moe_intermediate_size=INTERMEDIATE,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=TOP_K,
    )
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config).bfloat16().eval()


def test_x_and_h_are_those_of_the_models_own_experts(
    recording: ModuleType, model: torch.nn.Module
) -> None:
    experts, seen = model.model.layers[1].mlp.experts, []
    experts.register_forward_hook(lambda _module, inputs, out: seen.append((inputs, out)))
    recorder = recording.Recorder(model, tokens=100)
    recorder.read(torch.arange(TOKENS)[None])
    arrays = recorder.arrays()
    assert set(arrays) == {f"layer{n}.{part}" for n in (0, 1) for part in "xh"}
    ((hidden, ids, weights), out) = seen[0]
    ids, weights = ids.clone(), weights.clone()  # of the inference mode no more
    assert (widen_bf16(arrays["layer1.x"]) == hidden.float().numpy()).all()
    h = torch.from_numpy(arrays["layer1.h"]).reshape(TOKENS, TOP_K, INTERMEDIATE)
    down = experts.down_proj[ids].float()
    combined = (torch.einsum("tki,tkhi->tkh", h, down) * weights.float()[..., None]).sum(1)
    difference = (combined - out.float()).norm() / out.float().norm()
    assert 0 < difference < 0.02  # the module rounds to bf16 at every step


def test_so_many_tokens_of_a_text_and_no_hook_is_left(
    recording: ModuleType, model: torch.nn.Module
) -> None:
    recorder = recording.Recorder(model, tokens=4)
    recorder.read(torch.arange(3)[None])
    recorder.read(torch.arange(TOKENS)[None])
    model(torch.arange(TOKENS)[None])
    shapes = {name: array.shape for name, array in recorder.arrays().items()}
    assert shapes["layer0.x"] == (3 + 4, HIDDEN)
    assert shapes["layer0.h"] == ((3 + 4) * TOP_K, INTERMEDIATE)
    again = recording.Recorder(model, tokens=4)
    again.read(torch.arange(3)[None])
    again.read(torch.arange(TOKENS)[None])
    assert all(np.array_equal(a, again.arrays()[n]) for n, a in recorder.arrays().items())
