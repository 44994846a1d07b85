"""Byte ranges of experts: the right bytes, all of them, nothing else's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from moet.checkpoint import Span, open_checkpoint
from moet.testing.toy import FAMILIES, toy_model, write_toy_checkpoint


def rows_of(span: Span) -> np.ndarray:
    raw = np.fromfile(span.file, np.uint8)
    starts = span.offset + np.arange(span.rows) * span.step
    return np.stack([raw[s : s + span.row_bytes] for s in starts])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", [1, 3])
def test_spans_are_the_experts(family: str, shards: int, toy: Callable[..., Path]) -> None:
    checkpoint, model = open_checkpoint(toy(family, shards)), toy_model(family)
    for layer in checkpoint.geometry.moe_layers:
        for expert in (0, 5):
            spans, wanted = checkpoint.expert_tensors(layer, expert), model.expert(layer, expert)
            for m, w in zip(spans.matrices, (wanted.gate, wanted.up, wanted.down), strict=True):
                assert np.array_equal(rows_of(m.codes), w.codes)
                assert np.array_equal(rows_of(m.scales), w.scales)
            biases = (wanted.gate_bias, wanted.up_bias, wanted.down_bias)
            for m, b in zip(spans.matrices, biases, strict=True):
                assert (m.bias is None) == (b is None)
                if m.bias is not None and b is not None:
                    assert np.array_equal(rows_of(m.bias).view("<u2").ravel(), b.view("<u4") >> 16)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_cover_their_tensors_exactly(family: str, toy: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(toy(family))
    geometry = checkpoint.geometry
    covered: dict[int, int] = {}
    for layer in geometry.moe_layers:
        for expert in range(geometry.experts):
            for m in checkpoint.expert_tensors(layer, expert).matrices:
                for span in filter(None, (m.codes, m.scales, m.bias)):
                    for n in range(span.rows):
                        at = span.offset + n * span.step
                        assert at not in covered
                        covered[at] = span.row_bytes
    names = checkpoint.routed_expert_names()
    assert sum(covered.values()) == sum(checkpoint.tensors[n].nbytes for n in names)
    assert checkpoint.expert_bytes == sum(covered.values())
    ordered = sorted(covered.items())
    assert all(a + n <= b for (a, n), (b, _) in pairwise(ordered))


def test_which_names_are_experts(toy: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(toy("deepseek_v4"))
    assert checkpoint.is_routed_expert("layers.1.ffn.experts.7.w2.scale")
    for other in (
        "layers.1.ffn.shared_experts.w2.scale",
        "layers.2.ffn.experts.7.w2.scale",  # a layer past the last: a draft's
        "mtp.0.ffn.experts.7.w2.scale",
        "layers.1.ffn.gate.weight",
        f"layers.{'1' * 5000}.ffn.experts.7.w2.scale",  # longer than int() reads
    ):
        assert not checkpoint.is_routed_expert(other)
    names = checkpoint.routed_expert_names()
    assert len(names) == 2 * 8 * 6
    assert all(map(checkpoint.is_routed_expert, names))


def test_the_prefix_of_deepseek_is_optional(tmp_path: Path) -> None:
    model = toy_model("deepseek_v4")
    plans = model.plans
    model.plans = {
        "model." + name: type(plan)("model." + name, plan.dtype, plan.shape, plan.source)
        for name, plan in plans.items()
    }
    model.write(tmp_path / "prefixed")
    checkpoint = open_checkpoint(tmp_path / "prefixed")
    span = checkpoint.expert_tensors(0, 3).up.codes
    assert span.tensor == "model.layers.0.ffn.experts.3.w3.weight"
    wanted = toy_model("deepseek_v4").expert(0, 3)
    assert np.array_equal(rows_of(span), wanted.up.codes)


def test_draft_experts_after_the_model_are_left_alone(tmp_path: Path) -> None:
    """Some families number their MTP layer as one more layer."""
    write_toy_checkpoint(tmp_path / "x", layers=3, num_nextn_predict_layers=0)
    config = (tmp_path / "x" / "config.json").read_text()
    cut = config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 2')
    (tmp_path / "x" / "config.json").write_text(
        cut.replace('"num_nextn_predict_layers": 0', '"num_nextn_predict_layers": 1')
    )
    checkpoint = open_checkpoint(tmp_path / "x")
    assert checkpoint.geometry.moe_layers == (0, 1)
    assert not any(".layers.2." in name for name in checkpoint.routed_expert_names())
