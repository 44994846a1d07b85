"""Random-weight checkpoints: real layouts, plausible statistics, the skew that was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moet import demo
from moet.base.errors import UsageError
from moet.checkpoint import BrokenCheckpoint, Fault, open_checkpoint, synth
from moet.checkpoint.synth.draw import Draw, to_bf16, to_e4m3
from moet.checkpoint.synth.model import COMPLETE, SynthModel
from moet.checkpoint.synth.router import CAP, router_weights, zipf_shares
from moet.formats import mxfp4
from moet.testing.toy import FAMILIES, toy_config, toy_model, write_toy_checkpoint

SMALL = {"layers": 2, "vocab": 64}


def test_a_preset_s_size_is_that_of_all_its_tensors() -> None:
    for name in ("olmoe-1b-7b", "gpt-oss-20b"):
        assert synth.preset_bytes(name) == synth.model(name).nbytes


def test_a_tokenizer_fills_the_vocabulary(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers: pip install moet[cpu]")
    assert synth.write_tokenizer(tmp_path, 1000, demo.path()) == 1024
    assert list(tmp_path.iterdir()) == []
    assert synth.write_tokenizer(tmp_path, 5000, demo.path()) == 0
    ours = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    small = tokenizers.Tokenizer.from_file(str(demo.path() / "tokenizer.json"))
    assert ours.get_vocab_size() == 5000
    assert ours.decode([4999, 1024]) == " <4999> <1024>"
    text = "What is <1024> + <4999>?"
    assert ours.encode(text).ids == small.encode(text).ids
    assert "model_max_length" not in (tmp_path / "tokenizer_config.json").read_text()
    assert (tmp_path / "chat_template.jinja").exists()


def experts_for(name: str) -> int:
    return 8 if name != "olmoe-1b-7b" else 9


@pytest.mark.parametrize("name", synth.PRESETS)
def test_every_preset_makes_a_checkpoint_that_opens(name: str, tmp_path: Path) -> None:
    """Full widths, planned; then the experts of one layer as they would lie in files."""
    model = synth.model(name, experts=experts_for(name), **SMALL)
    assert model.geometry.moe_layers == (0, 1)
    assert model.complete == (model.geometry.architecture in COMPLETE)
    expert = model.expert(1, 7)
    g = model.geometry
    assert expert.gate.codes.shape == expert.up.codes.shape == (g.intermediate, g.hidden // 2)
    assert expert.down.scales.shape == (g.hidden, g.intermediate // 32)
    assert (expert.up_bias is not None) == g.biased
    routed = sum(p.nbytes for n, p in model.plans.items() if ".experts." in n)
    bias = 2 * (2 * g.intermediate + g.hidden) if g.biased else 0
    assert routed == 2 * g.experts * (3 * g.hidden * g.intermediate * 17 // 32 + bias)


@pytest.mark.parametrize("family", FAMILIES)
def test_disk_and_memory_hold_the_same(family: str, tmp_path: Path) -> None:
    model = write_toy_checkpoint(tmp_path / "x", family, shards=2)
    checkpoint = open_checkpoint(tmp_path / "x")
    assert checkpoint.tensors.keys() == model.plans.keys()
    for name, info in checkpoint.tensors.items():
        raw = np.fromfile(info.file, np.uint8, info.nbytes, offset=info.offset)
        assert np.array_equal(raw, model.tensor(name)), name
    assert checkpoint.config == model.config


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_decides_every_byte(family: str) -> None:
    one, same, other = (toy_model(family, seed=s, zipf=0.7) for s in (1, 1, 2))
    differ = 0
    for name in one.plans:
        assert np.array_equal(one.tensor(name), same.tensor(name))
        differ += not np.array_equal(one.tensor(name), other.tensor(name))
    norms = sum("norm" in n or n.endswith(("hc_attn_scale", "hc_ffn_scale")) for n in one.plans)
    assert differ >= 0.5 * (len(one.plans) - norms)


def test_experts_differ_from_each_other() -> None:
    model = toy_model(hidden=256, intermediate=128)
    codes = [model.expert(i, e).up.codes for i in (0, 1) for e in range(8)]
    assert len({c.tobytes() for c in codes}) == 16


def test_scales_and_codes_are_those_of_quantised_gaussians() -> None:
    model = toy_model(hidden=2048, intermediate=512, experts=8, layers=1)
    expert = model.expert(0, 2)
    std = 1.5 * 2048**-0.5
    weights = np.random.default_rng(9).standard_normal((512, 2048)).astype(np.float32) * std
    real = mxfp4.quantise(weights)
    for ours, theirs, top in (
        (expert.up.scales, real.scales, 256),
        (mxfp4.unpack_codes(expert.up.codes), mxfp4.unpack_codes(real.codes), 16),
    ):
        p = np.bincount(ours.ravel(), minlength=top) / ours.size
        q = np.bincount(theirs.ravel(), minlength=top) / theirs.size
        assert np.abs(p - q).max() < 0.02
    values = mxfp4.dequantise(expert.up.codes, expert.up.scales)
    assert abs(values.std() / std - 1) < 0.03
    # codes and their scales come from one block: each block's largest code is 4 or 6
    peaks = np.abs(mxfp4.E2M1_X2[mxfp4.unpack_codes(expert.up.codes)]).reshape(512, -1, 32).max(2)
    assert set(np.unique(peaks)) <= {8, 12}


def slope(frequency: np.ndarray, keep: np.ndarray) -> float:
    ranks = np.arange(1, frequency.size + 1)
    return float(np.polyfit(np.log(ranks[keep]), np.log(frequency[keep]), 1)[0])


def chosen(weights: np.ndarray, top_k: int, tokens: int = 20_000) -> np.ndarray:
    """Share of random hidden states that choose each expert, most frequent first."""
    x = np.random.default_rng(3).standard_normal((tokens, weights.shape[1]), dtype=np.float32)
    x /= np.sqrt((x * x).mean(1, keepdims=True))  # as a norm layer leaves them
    picks = np.argpartition(x @ weights.T, -top_k, axis=1)[:, -top_k:]
    return np.sort(np.bincount(picks.ravel(), minlength=len(weights)))[::-1] / tokens


@pytest.mark.parametrize(
    ("experts", "top_k", "zipf"), [(256, 6, 0.6), (128, 8, 1.0), (64, 4, 0.8), (32, 4, 0.5)]
)
def test_routers_follow_zipfs_law(experts: int, top_k: int, zipf: float) -> None:
    rng = np.random.default_rng(0)
    frequency = chosen(router_weights(512, experts, top_k, zipf, rng), top_k)
    free = zipf_shares(experts, top_k, zipf) < CAP
    assert free.sum() > 0.9 * experts
    assert abs(slope(frequency, free) + zipf) < 0.05


def test_a_written_router_has_the_skew(tmp_path: Path) -> None:
    model = write_toy_checkpoint(
        tmp_path / "x", hidden=512, experts=64, top_k=4, layers=1, zipf=0.8
    )
    bits = model.tensor("model.layers.0.mlp.gate.weight").view("<u2").astype(np.uint32) << 16
    frequency = chosen(bits.view(np.float32).reshape(64, 512), 4)
    assert abs(slope(frequency, zipf_shares(64, 4, 0.8) < CAP) + 0.8) < 0.06


def test_no_skew_is_uniform() -> None:
    frequency = chosen(router_weights(512, 64, 4, 0.0, np.random.default_rng(0)), 4)
    assert frequency.max() / frequency.min() < 1.3


@pytest.mark.parametrize(("experts", "top_k", "zipf"), [(256, 6, 1.7), (8, 2, 0.5), (4, 4, 1.0)])
def test_shares_add_up_and_respect_the_cap(experts: int, top_k: int, zipf: float) -> None:
    shares = zipf_shares(experts, top_k, zipf)
    assert shares.sum() == pytest.approx(top_k, rel=1e-6)
    assert (np.diff(shares) <= 1e-12).all()
    assert shares.max() <= max(CAP, top_k / experts) + 1e-9


def test_hash_layers_get_a_table_with_the_same_law() -> None:
    model = toy_model("deepseek_v4", experts=32, num_hash_layers=1, vocab=8192, zipf=1.0)
    table = model.tensor("layers.0.ffn.gate.tid2eid").view("<i4").reshape(8192, 2)
    assert (np.sort(table, axis=1)[:, 0] != np.sort(table, axis=1)[:, 1]).all()
    frequency = np.sort(np.bincount(table.ravel(), minlength=32))[::-1]
    assert frequency[0] > 5 * frequency[16]
    assert "layers.1.ffn.gate.bias" in model.plans
    assert "layers.0.ffn.gate.bias" not in model.plans


def test_cuts_follow_through() -> None:
    model = synth.model("gpt-oss-120b", layers=3, experts=16, vocab=128)
    config = model.config
    assert (config["num_hidden_layers"], config["num_local_experts"]) == (3, 16)
    assert config["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert synth.PRESETS["gpt-oss-120b"]["num_hidden_layers"] == 36  # the table is untouched


def test_special_front_layers_are_dropped_first() -> None:
    cut = synth.cut_config(synth.named_config("glm-5.2"), layers=76, experts=None, vocab=None)
    assert cut["first_k_dense_replace"] == 1
    cut = synth.cut_config(synth.named_config("deepseek-v4-flash"), layers=4, experts=8, vocab=9)
    assert (cut["num_hash_layers"], cut["compress_ratios"]) == (0, [0, 0, 4, 128])
    cut = synth.cut_config(synth.named_config("kimi-k2.7"), layers=2, experts=None, vocab=None)
    assert cut["text_config"]["first_k_dense_replace"] == 0


@pytest.mark.parametrize(
    "sizes", [{"layers": 0}, {"layers": 49}, {"experts": 129}, {"experts": 7}, {"vocab": -1}]
)
def test_impossible_cuts_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError) as caught:
        synth.model("qwen3-30b-a3b", **sizes)
    assert caught.value.hint


def test_an_unknown_preset_lists_the_known() -> None:
    with pytest.raises(BrokenCheckpoint, match="gpt-oss-20b") as caught:
        synth.model("gpt-oss-2b")
    assert caught.value.fault is Fault.UNKNOWN_PRESET
    assert caught.value.hint


@pytest.mark.parametrize("quant", [None, {"quant_method": "fp8"}])
def test_a_config_file_gets_mxfp4_experts(quant: Any, tmp_path: Path) -> None:
    config = {**toy_config(), "quantization_config": quant}
    (tmp_path / "config.json").write_text(json.dumps(config))
    synth.write(str(tmp_path / "config.json"), tmp_path / "out", layers=1)
    assert open_checkpoint(tmp_path / "out").geometry.moe_layers == (0,)


def test_a_broken_config_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    with pytest.raises(BrokenCheckpoint) as caught:
        synth.model(str(tmp_path / "config.json"))
    assert caught.value.fault is Fault.BAD_CONFIG


@pytest.mark.parametrize("changed", [{"hidden_size": 72}, {"moe_intermediate_size": 80}])
def test_widths_without_whole_blocks_are_refused(changed: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**toy_config(), **changed}))
    with pytest.raises(BrokenCheckpoint, match="not a multiple of 32") as caught:
        synth.write(str(tmp_path), tmp_path / "out")
    assert caught.value.fault is Fault.UNSUPPORTED_EXPERTS
    assert "blocks of 32" in caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"head_dim": "wide"}, "head_dim is 'wide'; a whole number from 1 up"),
        ({"num_attention_heads": -1}, "num_attention_heads is -1; a whole number from 1 up"),
        ({"num_key_value_heads": None}, "odd"),
        ({"vocab_size": "big"}, "vocab_size is 'big'; a whole number from 1 up"),
        ({"vocab_size": None}, "would have the shape"),
        ({"vocab_size": 0}, "vocab_size is 0; a whole number from 1 up"),
        ({"num_hidden_layers": 1 << 20}, "num_hidden_layers is 1048576; 4096 at most"),
    ],
)
def test_numbers_that_other_tensors_need(
    changed: dict[str, Any], what: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**toy_config(), **changed}))
    with pytest.raises(BrokenCheckpoint, match=what) as caught:
        synth.model(str(tmp_path))
    assert caught.value.fault is Fault.BAD_CONFIG


def test_a_number_that_is_missing_is_named(tmp_path: Path) -> None:
    config = toy_config()
    del config["num_attention_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BrokenCheckpoint, match="num_attention_heads is missing"):
        synth.model(str(tmp_path))


def test_how_a_model_is_published(tmp_path: Path) -> None:
    formats = {name: synth.published_format(name) for name in synth.PRESETS}
    assert (formats["gpt-oss-20b"], formats["qwen3-30b-a3b"]) == ("MXFP4", "BF16")
    assert set(formats.values()) == {"MXFP4", "BF16", "NVFP4", "INT4"}
    config = {**toy_config(), "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert synth.published_format(str(tmp_path)) == "FP8"


def test_narrow_floats_round_to_nearest() -> None:
    x = np.array([1.0, 1.00390625, 1.01171875, -2.5, 0.0], np.float32)  # ties go to even
    assert to_bf16(x).tolist() == [0x3F80, 0x3F80, 0x3F82, 0xC020, 0]
    e4m3 = to_e4m3(np.array([0, 2**-9, 1, 1.124, -1.126, 448, 1e9], np.float32))
    assert e4m3.tolist() == [0, 1, 0x38, 0x39, 0xB9, 0x7E, 0x7E]


def test_a_pool_is_read_alike_in_any_pieces() -> None:
    (codes, _) = Draw(0).mxfp4("k", ("c", "s"), ((3000, 512), (3000, 32)), 1.0)
    whole = np.empty(codes.nbytes, np.uint8)
    codes.source.fill(whole, 0)
    pieces, at = np.empty_like(whole), 0
    rng = np.random.default_rng(1)
    while at < whole.size:
        n = min(int(rng.integers(1, 70_000)), whole.size - at)
        codes.source.fill(pieces[at : at + n], at)
        at += n
    assert np.array_equal(whole, pieces)


@pytest.mark.parametrize("zipf", [-0.1, 5.0, float("nan"), float("inf")])
def test_impossible_skews_are_refused(zipf: float) -> None:
    with pytest.raises(UsageError) as caught:
        toy_model(zipf=zipf)
    assert caught.value.hint


@pytest.mark.parametrize("zipf", [0.01, 4.0])
def test_the_steepest_and_the_flattest_skew_can_be_drawn(zipf: float) -> None:
    weights = router_weights(64, 256, 6, zipf, np.random.default_rng(0))
    assert np.isfinite(weights).all()
    assert np.linalg.norm(weights, axis=1).max() == pytest.approx(2, rel=1e-5)


def test_special_tokens_stay_inside_a_cut_vocabulary() -> None:
    config = synth.model("gpt-oss-20b", layers=1, vocab=100).config
    assert {config[f"{t}_token_id"] for t in ("bos", "eos", "pad")} == {99}


def test_models_with_a_wrong_config_are_refused() -> None:
    with pytest.raises(BrokenCheckpoint):
        SynthModel({**toy_config(), "num_experts": 0})
