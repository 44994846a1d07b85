"""transformers models with moet's experts: on the CPU, and on a card that the CPU stands in for."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install moet[cpu]")
pytest.importorskip("transformers", reason="transformers is not installed: pip install moet[cpu]")

import transformers  # noqa: E402
from tests.engine import dequantised, incomplete  # noqa: E402
from tests.engine.emulated import PATIENT, emulated_card  # noqa: E402

from moet import demo  # noqa: E402
from moet.base.errors import (  # noqa: E402
    CheckpointError,
    EngineError,
    StepError,
    TierError,
    UnsupportedError,
    UsageError,
)
from moet.checkpoint import open_checkpoint  # noqa: E402
from moet.engine import transformers_model  # noqa: E402
from moet.engine.transformers_adapter import Served, load_on_cpu, split_of  # noqa: E402
from moet.engine.transformers_card import CardServed, load_on_card  # noqa: E402
from moet.engine.transformers_greedy import Answer, Greedy, answers  # noqa: E402
from moet.hybrid.heat import write_heat  # noqa: E402
from moet.hybrid.mailbox import Variant  # noqa: E402
from moet.kernels.cpu import CpuLayer, Pool  # noqa: E402
from moet.kernels.spec import DType  # noqa: E402
from moet.testing.toy import write_toy_checkpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about itself

GEOMETRY = open_checkpoint(demo.path()).geometry
QUESTIONS = ("What is 66 + 268?", "Sort: 5, 3, 9")
TOKENS = 4


def tokenised(text: str) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo.path())
    said = [{"role": "user", "content": text}]
    ids: list[int] = tokenizer.apply_chat_template(
        said, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return ids


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [tokenised(text) for text in QUESTIONS]


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[Served]:
    with load_on_cpu(demo.path(), pool=Pool(2)) as served:
        yield served


@pytest.fixture(scope="module")
def said(on_cpu: Served, prompts: list[list[int]]) -> list[Answer]:
    return answers(on_cpu, prompts, TOKENS)


# ---- on the CPU


def recorded(served: Served, ids: Any) -> list[tuple[int, Any, Any, Any, Any]]:
    """(layer, x, ids, weights, output) of each experts module in one pass."""
    kept: list[tuple[int, Any, Any, Any, Any]] = []
    modules = transformers_model.experts_by_layer(served.model, served.checkpoint.geometry)
    hooks = [
        module.register_forward_hook(lambda _m, given, out, i=i: kept.append((i, *given, out)))
        for i, module in modules.items()
    ]
    with torch.no_grad():
        served.model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return kept


def judge(served: Served, kept: list[tuple[int, Any, Any, Any, Any]]) -> int:
    """Compares with a `CpuLayer` of its own; outputs compared."""
    compared = 0
    for i, x, ids, weights, out in kept:
        experts = served.layers[i].experts
        layer = CpuLayer(experts.spec, Pool(1))
        for expert, lease in experts._leases.items():
            layer.bind(expert, lease.address)
        bits = x.view(torch.uint16).numpy()
        want = layer.run(bits, ids.int().numpy(), weights.float().numpy(), DType.BF16)
        np.testing.assert_array_equal(out.view(torch.uint16).numpy(), want)
        compared += want.size
    return compared


def test_every_layers_output_is_the_kernels(on_cpu: Served, prompts: list[list[int]]) -> None:
    kept = recorded(on_cpu, torch.tensor(prompts[:1]))
    assert [i for i, *_ in kept] == list(GEOMETRY.moe_layers)
    assert judge(on_cpu, kept) == len(kept) * len(prompts[0]) * GEOMETRY.hidden


def test_the_layers_of_gpt_oss_too(tmp_path: Path) -> None:
    sizes = {"hidden": 128, "intermediate": 96, "experts": 16, "top_k": 4}
    write_toy_checkpoint(tmp_path / "toy", "gpt_oss", **sizes)
    with load_on_cpu(tmp_path / "toy", pool=Pool(2)) as served:
        kept = recorded(served, torch.arange(2, 20)[None])
        assert judge(served, kept) == 2 * 18 * 128
        with pytest.raises(UnsupportedError, match="windows"):
            Greedy(served, 32)


def test_close_to_stock_on_the_dequantised_weights(
    on_cpu: Served, prompts: list[list[int]], tmp_path: Path
) -> None:
    dequantised.write(demo.path(), tmp_path / "bf16")
    stock = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "bf16", dtype=torch.bfloat16
    ).eval()
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            pair = [m(ids).logits[0].float().log_softmax(-1) for m in (on_cpu.model, stock)]
        told = [p[:-1].gather(1, ids[0, 1:, None]) for p in pair]
        assert (told[0] - told[1]).abs().mean() < 0.03
        assert pair[0].argmax(-1)[-1] == pair[1].argmax(-1)[-1]


def test_generate_says_the_same(
    on_cpu: Served, prompts: list[list[int]], said: list[Answer]
) -> None:
    for prompt, answer in zip(prompts, said, strict=True):
        out = on_cpu.model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        assert out == list(answer.tokens[: len(out)])
        assert len(out) == TOKENS or out[-1] in on_cpu.model.generation_config.eos_token_id
        assert all(value <= 0 for value in answer.logprobs)


def test_experts_are_no_parameters_of_torch(on_cpu: Served) -> None:
    names = [name for name, _ in on_cpu.model.named_parameters()]
    assert not any(".experts." in name for name in names)
    assert len(names) > 50
    assert on_cpu.model.dtype is torch.bfloat16
    assert not any(p.is_meta or p.requires_grad for p in on_cpu.model.parameters())
    assert on_cpu.model.lm_head.weight is on_cpu.model.model.embed_tokens.weight
    assert all(calls > 0 for calls in on_cpu.calls.values())


def test_another_type_and_a_second_close() -> None:
    served = load_on_cpu(demo.path(), dtype=torch.float32, pool=Pool(1))
    with torch.no_grad():
        assert served.model(torch.tensor([[5, 6]])).logits.dtype is torch.float32
    served.close()
    served.close()


# ---- on a card


@pytest.fixture(scope="module")
def on_card(
    emulated_library: ctypes.CDLL, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CardServed]:
    """A toy, since a stand-in takes its time."""
    folder = tmp_path_factory.mktemp("on_card") / "toy"
    write_toy_checkpoint(folder, hidden=64, intermediate=64, experts=8, top_k=2)
    with on_a_stand_in(emulated_library, folder, Variant.POLL, share=0.5) as served:
        yield served


@contextmanager
def on_a_stand_in(
    library: ctypes.CDLL, folder: Path, variant: Variant, **options: Any
) -> Iterator[CardServed]:
    """A model on a card of its own, which must be empty at the end."""
    card = emulated_card(library)
    usual = {"pool": Pool(2), "max_tokens": 16, "stall_seconds": PATIENT}
    try:
        with load_on_card(folder, card=card, variant=variant, **{**usual, **options}) as served:
            yield served
    finally:
        assert card.gpu.held == {}  # type: ignore[attr-defined]
        assert card.memory.left == (0, 0, 0)  # type: ignore[attr-defined]
        card.close()


def test_any_share_on_the_card_says_the_same(
    emulated_library: ctypes.CDLL, prompts: list[list[int]], said: list[Answer]
) -> None:
    """moet-tiny with none, a third and all of its experts on the card, against the CPU alone.

    The host function's way of waiting: the others poll, and here the cores are the card, too.
    """
    layers = len(GEOMETRY.moe_layers)
    passes = -(-len(prompts[0]) // 16) + TOKENS - 1
    shares = {0.0: 0, 0.3: 10 * layers, 1.0: GEOMETRY.experts * layers}
    loaded = on_a_stand_in(emulated_library, demo.path(), Variant.HOSTFUNC, capacity_bytes=32 << 20)
    with loaded as served:
        for share, resident in shares.items():
            served.place(split_of(GEOMETRY, share))
            assert served.experts.resident == resident
            before = served.experts.mailbox.answered
            assert answers(served, prompts[:1], TOKENS) == said[:1]
            asked = served.experts.mailbox.answered - before
            assert (asked == 0) if share == 1 else (passes * layers // 2 < asked <= passes * layers)


def test_generate_on_the_card(on_card: CardServed) -> None:
    prompt = torch.arange(2, 21)[None]
    with load_on_cpu(on_card.checkpoint.folder, pool=Pool(1)) as alone:
        pair = [
            served.model.generate(prompt, max_new_tokens=4, do_sample=False)
            for served in (on_card, alone)
        ]
    assert torch.equal(*pair)
    assert pair[0].shape[1] > 19


def test_an_answer_that_does_not_come_is_an_error_before_logits(on_card: CardServed) -> None:
    ids = torch.arange(2, 9)[None]
    with torch.no_grad():
        want = on_card.model(ids).logits
        layer = on_card.experts._cpu[1]
        kept = {k: lease for k, lease in on_card.experts._leases.items() if k.layer == 1}
        for key in kept:
            layer.unbind(key.expert)
        with pytest.raises(StepError, match="refused"):
            on_card.model(ids)
        with pytest.raises(StepError):
            on_card.model(ids)
        for key, lease in kept.items():
            layer.bind(key.expert, lease.address)
        on_card.experts.mailbox.reset()
        assert torch.equal(on_card.model(input_ids=ids).logits, want)


def test_a_pass_that_fails_half_way_leaves_no_trace(on_card: CardServed) -> None:
    ids = torch.arange(2, 9)[None]
    layer = on_card.model.model.layers[1]
    with torch.no_grad():
        want = on_card.model(ids).logits
        hook = layer.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            on_card.model(ids)
        hook.remove()
        assert torch.equal(on_card.model(ids).logits, want)
        embedded = on_card.model.get_input_embeddings()(ids)
        assert torch.equal(on_card.model(inputs_embeds=embedded).logits, want)
        with pytest.raises(EngineError, match="without input_ids"):
            on_card.model()


def test_a_failed_load_gives_everything_back(
    emulated_library: ctypes.CDLL, on_card: CardServed
) -> None:
    options = {"share": 1.0, "capacity_bytes": 4096}
    loaded = on_a_stand_in(emulated_library, on_card.checkpoint.folder, Variant.POLL, **options)
    with pytest.raises(TierError), loaded:
        pass


# ---- splits


def test_a_share_of_the_hottest(tmp_path: Path) -> None:
    heat = {i: tuple(range(GEOMETRY.experts)) for i in GEOMETRY.moe_layers}
    write_heat(tmp_path / "heat", GEOMETRY, heat)
    split = split_of(GEOMETRY, 0.1, tmp_path / "heat")
    assert split == dict.fromkeys(GEOMETRY.moe_layers, (31, 30, 29))
    assert split_of(GEOMETRY, 0.1) == dict.fromkeys(GEOMETRY.moe_layers, (0, 1, 2))


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(UsageError, match="share"):
        split_of(GEOMETRY, share)


# ---- refusals


def test_quantised_tensors_outside_of_experts_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden": 128, "intermediate": 128, "experts": 64, "top_k": 6}
    write_toy_checkpoint(tmp_path / "toy", "deepseek_v4", **sizes)
    with pytest.raises(UnsupportedError, match="outside of the routed experts are quantised"):
        load_on_cpu(tmp_path / "toy")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_toy_checkpoint(tmp_path / "toy", shards=2)
    name = "model.layers.1.self_attn.q_proj.weight"
    incomplete.write(tmp_path / "toy", tmp_path / "broken", name)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj"):
        load_on_cpu(tmp_path / "broken")


def test_experts_that_nobody_bound_are_an_error() -> None:
    checkpoint = open_checkpoint(demo.path())
    model = transformers_model.build(checkpoint, None, torch.device("cpu"))
    with pytest.raises(EngineError, match="Qwen3MoeExperts runs before"):
        model(torch.tensor([[5]]))


def test_other_experts_than_the_checkpoints_are_an_error(on_cpu: Served) -> None:
    module = transformers_model.experts_by_layer(on_cpu.model, GEOMETRY)[2]
    module.moet_numbers += 1
    try:
        with pytest.raises(EngineError, match="experts of layer 2 are"):
            transformers_model.experts_by_layer(on_cpu.model, GEOMETRY)
    finally:
        module.moet_numbers -= 1


def test_greedy_answers_that_cannot_be(on_cpu: Served) -> None:
    greedy = Greedy(on_cpu, 8)
    for prompt, tokens in (([], 2), ([1] * 7, 2), ([1], 0)):
        with pytest.raises(UsageError, match="in a cache of 8"):
            greedy.answer(prompt, tokens)
    with pytest.raises(UnsupportedError, match="graph of a model on the CPU"):
        Greedy(on_cpu, 8, captured=True)
