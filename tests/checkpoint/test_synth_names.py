"""The tensors that synth writes beside experts are those of the stock models, name and shape."""

from __future__ import annotations

import pytest

from moet.testing.toy import toy_config, toy_model

WHY = "the stock models' own names come from Transformers: pip install moet[cpu]"
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_names_and_shapes_are_the_stock_models(family: str) -> None:
    config = {k: v for k, v in toy_config(family).items() if k != "quantization_config"}
    with torch.device("meta"):
        stock = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config)
        )
    wanted = {n: tuple(p.shape) for n, p in stock.state_dict().items() if ".experts." not in n}
    plans = toy_model(family).plans.values()
    ours = {p.name: p.shape for p in plans if ".experts." not in p.name}
    assert ours == wanted
