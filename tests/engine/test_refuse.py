"""What moet does not serve: each thing by name, with a hint, from the engine's config alone."""

from __future__ import annotations

from types import SimpleNamespace as Fake
from typing import Any

import pytest

from moet.base.errors import EngineError, UnsupportedError, UsageError
from moet.checkpoint import ModelGeometry
from moet.checkpoint.geometry import read_geometry
from moet.engine import asked, live, refuse, versions
from moet.engine.live import LiveLayer
from moet.testing.toy import toy_config


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "is_cpu_platform", lambda: True)


def config(**changed: Any) -> Any:
    parallel = Fake(
        data_parallel_size=1, pipeline_parallel_size=1, prefill_context_parallel_size=1,
        enable_eplb=False, enable_expert_parallel=False, enable_elastic_ep=False,
        tensor_parallel_size=2,
    )  # fmt: skip
    parts: dict[str, Any] = {
        "parallel_config": parallel,
        "lora_config": None,
        "speculative_config": None,
        "kernel_config": Fake(moe_backend="auto"),
        "load_config": Fake(model_loader_extra_config={}),
        "quant_config": Fake(online_quantization_config=None),
    }
    for name, value in changed.items():
        setattr(parallel, name, value) if hasattr(parallel, name) else parts.update({name: value})
    return Fake(**parts)


def test_what_is_covered_passes() -> None:
    refuse.engine_config(config())
    refuse.engine_config(config(quant_config=None))


REFUSED = [
    ({"data_parallel_size": 2}, r"data parallelism \(--data-parallel-size 2\)"),
    ({"pipeline_parallel_size": 3}, "pipeline parallelism"),
    ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
    ({"enable_eplb": True}, "load balancing"),
    ({"enable_expert_parallel": True}, "expert parallelism"),
    ({"enable_elastic_ep": True}, "elastic"),
    ({"lora_config": Fake()}, "LoRA"),
    ({"speculative_config": Fake(method="mtp")}, r"speculative decoding \(mtp\)"),
    ({"speculative_config": Fake(method="ngram")}, r"speculative decoding \(ngram\)"),
    ({"load_config": Fake(model_loader_extra_config={"a": 1})}, "--model-loader-extra-config"),
    ({"kernel_config": Fake(moe_backend="deep_gemm_mega_moe")}, "deep_gemm_mega_moe"),
    ({"quant_config": Fake(online_quantization_config=Fake())}, "online quantisation"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_engine_configs(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"moet does not serve .*{message}") as caught:
        refuse.engine_config(config(**changed))
    assert caught.value.hint


FLAGS = [
    ("--data-parallel-size 2", r"data parallelism \(--data-parallel-size 2\)"),
    ("-dp=2", "data parallelism"),
    ("-pp 2", r"pipeline parallelism \(--pipeline-parallel-size 2\)"),
    ("--pipeline_parallel_size=3", "pipeline parallelism"),
    ("-pcp 2", "prefill context parallelism"),
    ("--nnodes 2", "several machines"),
    ("--enable-expert-parallel", "expert parallelism"),
    ("-ep", "expert parallelism"),
    ("--enable-eplb", "load balancing"),
    ("--enable-elastic-ep", "elastic"),
    ("--max-num-seqs 2 --enable_lora", "LoRA"),
    ('--speculative-config {"method":"ngram"}', r"speculative decoding \(ngram\)"),
    ("-sc.method mtp", r"speculative decoding \(mtp\)"),
    ("--speculative_config.model=x", r"speculative decoding \(a draft model\)"),
    ("--spec-method ngram", r"speculative decoding \(ngram\)"),
    ("--spec-tokens 3", "speculative decoding"),
    ("--moe-backend triton", "--moe-backend triton"),
    ('--model-loader-extra-config {"num_threads":8}', "--model-loader-extra-config"),
]


@pytest.mark.parametrize(("line", "message"), FLAGS)
def test_flags(line: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"moet does not serve .*{message}") as caught:
        refuse.arguments(asked.read(tuple(line.split())))
    assert caught.value.hint.startswith("leave")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "-tp 2 --pipeline-parallel-size 1 --moe-backend auto",
        "--enable-lora --no-enable-lora",
        '--additional-config {"moet":{"arithmetic":"reference"},"other":1}',
        "--additional-config.moet.arithmetic reference",
        "--gpu-memory-utilization 0.5 --served-model-name x",
    ],
)
def test_flags_that_pass(line: str) -> None:
    refuse.arguments(asked.read(tuple(line.split())))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('--additional-config {"moet":{"arithmetics":"kernels"}}', "unknown setting .*arithmetics"),
        ("--additional-config.moet.arithmetic numpy", "numpy"),
        ('--additional_config={"moet":7}', "not an object"),
        ("--additional-config {", "is not JSON"),
        ("--additional-config [1]", "is not a JSON object"),
        ("--tensor-parallel-size 0", "'0' is not a number from 1 up"),
        ("-tp two", "'two' is not a number"),
        ("-dp", "expected one argument"),
        ("--max-model-len 0", "'0' is not a size"),
        ("--max-model-len lots", "'lots' is not a size"),
        ("--kv-cache-memory-bytes 1Q", "'1Q' is not a size"),
    ],
)
def test_flags_with_odd_values(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        refuse.arguments(asked.read(tuple(line.split())))
    assert caught.value.hint


def test_sizes() -> None:
    read = asked.read(("--max-model-len", "32k", "--kv-cache-memory-bytes=1G"))
    assert (read.max_model_len, read.kv_cache_memory_bytes) == (32_000, 1 << 30)
    for automatic in ("auto", "-1"):
        assert asked.read(("--max-model-len", automatic)).max_model_len == 0
    assert asked.read(()).max_model_len is None


def test_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refuse.sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match="darwin"):
        refuse.engine_config(config())
    monkeypatch.setattr(refuse.sys, "platform", "linux")
    monkeypatch.setattr(versions, "is_cpu_platform", lambda: False)
    with pytest.raises(UnsupportedError, match="accelerator"):
        refuse.engine_config(config())


def geometry(family: str = "qwen3_moe") -> ModelGeometry:
    return read_geometry(toy_config(family), Fake())


def routed(**changed: Any) -> Any:
    parallel = Fake(use_ep=False, enable_eplb=False, is_sequence_parallel=False)
    moe = Fake(
        moe_parallel_config=parallel, is_lora_enabled=False, num_logical_experts=8, hidden_dim=64,
        intermediate_size=64, has_bias=False, activation=Fake(value="silu"),
    )  # fmt: skip
    layer = Fake(
        moe_config=moe, layer_name="model.layers.1.mlp.experts", global_num_experts=8, top_k=2,
        apply_router_weight_on_input=False, swiglu_limit=None,
        expert_map_manager=Fake(num_fused_shared_experts=0),
    )  # fmt: skip
    for name, value in changed.items():
        owner = next(part for part in (layer, moe, parallel) if hasattr(part, name))
        setattr(owner, name, value)
    return layer


LAYERS = [
    ({"use_ep": True}, "expert parallelism"),
    ({"enable_eplb": True}, "load balancing"),
    ({"is_sequence_parallel": True}, "sequence-parallel"),
    ({"is_lora_enabled": True}, "LoRA on experts"),
    ({"apply_router_weight_on_input": True}, "router weights applied to the input"),
    ({"expert_map_manager": Fake(num_fused_shared_experts=1)}, "fused"),
    ({"num_logical_experts": 6}, "fused"),
    ({"activation": Fake(value="relu2_no_mul")}, "relu2_no_mul"),
    ({"activation": Fake(value="gelu")}, "'gelu'"),
]


@pytest.mark.parametrize(("changed", "message"), LAYERS)
def test_layers(changed: dict[str, Any], message: str) -> None:
    refuse.layer(routed())
    with pytest.raises(UnsupportedError, match=message) as caught:
        refuse.layer(routed(**changed))
    assert "model.layers.1" in caught.value.hint


MISMATCHES = [
    ({"hidden_dim": 128}, "hidden size is 128 to the engine and 64 to moet"),
    ({"intermediate_size": 96}, "intermediate size"),
    ({"global_num_experts": 9}, "experts is 9"),
    ({"top_k": 1}, "experts a token"),
    ({"activation": Fake(value="gelu_tanh")}, "activation is gelu_tanh"),
    ({"has_bias": True}, "biases"),
    ({"swiglu_limit": 10.0}, "clamp is 10.0 to the engine and None to moet"),
]


@pytest.mark.parametrize(("changed", "message"), MISMATCHES)
def test_the_engine_and_moet_must_agree(changed: dict[str, Any], message: str) -> None:
    refuse.mismatch(routed(), geometry())
    with pytest.raises(EngineError, match=message):
        refuse.mismatch(routed(**changed), geometry())


def test_the_clamp_of_gpt_oss_is_part_of_its_activation() -> None:
    layer = routed(activation=Fake(value="swigluoai"), has_bias=True)
    refuse.mismatch(layer, geometry("gpt_oss"))


@pytest.mark.parametrize(
    ("bound", "message"),
    [([0, 2], r"missing \[1\]"), ([0, 1, 2, 5], r"unknown \[5\]"), ([0, 1, 1, 2], "built")],
)
def test_every_layer_is_bound_once(bound: list[int], message: str) -> None:
    live.require_all_bound((0, 1, 2), [2, 0, 1])
    with pytest.raises(EngineError, match=message):
        live.require_all_bound((0, 1, 2), bound)


def test_every_layer_is_called() -> None:
    layers = [LiveLayer("a", Fake(run=lambda **_: None)), LiveLayer("b", Fake())]
    layers[0].run(x=0)
    live.require_all_called(layers[:1])
    with pytest.raises(EngineError, match="without moet's experts in b"):
        live.require_all_called(layers)
