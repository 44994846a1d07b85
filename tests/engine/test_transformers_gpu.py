"""The hybrid op and transformers models on a real card, eager and in torch's CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install moet[cpu]")
pytest.importorskip("transformers", reason="transformers is not installed: pip install moet[cpu]")
if not torch.cuda.is_available():
    pytest.skip("no GPU that torch can use", allow_module_level=True)

import transformers  # noqa: E402
from tests.engine.layer_pair import STEP, LayerPair, call  # noqa: E402

from moet import demo  # noqa: E402
from moet.base.errors import MoetError, StepError  # noqa: E402
from moet.checkpoint import open_checkpoint  # noqa: E402
from moet.engine.transformers_adapter import split_of  # noqa: E402
from moet.engine.transformers_card import (  # noqa: E402
    CardAccess,
    CardServed,
    load_on_card,
    open_card,
)
from moet.engine.transformers_greedy import answers  # noqa: E402
from moet.tiers.api import ExpertKey  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about itself

GEOMETRY = open_checkpoint(demo.path()).geometry
TOKENS = 16


@pytest.fixture(scope="module")
def card() -> Iterator[CardAccess]:
    try:
        card = open_card()
    except MoetError as error:
        pytest.skip(f"no GPU that moet can use: {error}")
    yield card
    card.close()


@pytest.fixture(scope="module")
def layer(card: CardAccess) -> Iterator[LayerPair]:
    layer = LayerPair(card)
    yield layer
    layer.experts.close()


def on_cpu(x: Any, weights: Any, ids: Any) -> Any:
    return torch.ops.moet.routed_experts(x.cpu(), weights.cpu(), ids.cpu(), "cpu")


def on_card(x: Any, weights: Any, ids: Any) -> Any:
    return torch.ops.moet.hybrid_experts(x, weights, ids, "card")


def in_halves(x: Any, weights: Any, ids: Any) -> Any:
    out = torch.ops.moet.hybrid_start(x, weights, ids, "card")
    _ = x.float() @ x.float().T
    torch.ops.moet.hybrid_finish(out, weights, ids, "card")
    return out


def cuda(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(t.cuda() for t in tensors)


@pytest.mark.parametrize("way", [on_card, in_halves])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, STEP, 2 * STEP + 1])
def test_the_cpu_ops_bits(layer: LayerPair, way: Any, dtype: Any, tokens: int) -> None:
    given = cuda(call(tokens, dtype))
    out = way(*given)
    torch.cuda.synchronize()
    layer.experts.mailbox.check()
    assert out.device.type == "cuda"
    assert torch.equal(out.cpu(), on_cpu(*given))


@pytest.mark.parametrize("way", [on_card, in_halves])
def test_torchs_graphs_replay_with_new_inputs_and_splits(layer: LayerPair, way: Any) -> None:
    given = cuda(call(STEP))
    mailbox = layer.experts.mailbox
    way(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with layer.card.memory.paused(), mailbox.recording() as posts, torch.cuda.graph(graph):
        out = way(*given)
    assert posts == [1]
    for seed, experts in enumerate([(1, 4, 6), (), (0, 2), (6,)]):
        layer.place(*experts)
        generator = torch.Generator().manual_seed(seed)
        given[0].copy_(torch.randn(given[0].shape, generator=generator))
        given[1].copy_(torch.rand(given[1].shape, generator=generator))
        out.fill_(torch.nan)
        mailbox.announce(posts[0])
        graph.replay()
        torch.cuda.synchronize()
        mailbox.check()
        assert torch.equal(out.cpu(), on_cpu(*given))


@pytest.fixture(scope="module")
def served(card: CardAccess) -> Iterator[CardServed]:
    with load_on_card(demo.path(), card=card, capacity_bytes=32 << 20) as served:
        yield served


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo.path())
    asked = ["What is 66 + 268?", "Sort: 5, 3, 9", "Numbers: " + " ".join(map(str, range(40)))]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True, tokenize=True, return_dict=False,
        )
        for text in asked
    ]  # fmt: skip


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_any_share_says_the_same(
    served: CardServed, prompts: list[list[int]], captured: bool
) -> None:
    said = []
    for share in (0.0, 0.3, 1.0):
        served.place(split_of(GEOMETRY, share))
        said.append(answers(served, prompts, TOKENS, captured=captured))
    assert said[0] == said[1] == said[2]
    assert all(value <= 0 for answer in said[0] for value in answer.logprobs)


def test_generate(served: CardServed, prompts: list[list[int]]) -> None:
    want = answers(served, prompts[:1], 4)[0].tokens
    ids = torch.tensor(prompts[:1]).cuda()
    out = served.model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    assert tuple(out.tolist()) == want[: len(out)]


def test_an_answer_that_does_not_come_is_an_error(
    served: CardServed, prompts: list[list[int]]
) -> None:
    served.place(split_of(GEOMETRY, 0.0))
    want = answers(served, prompts[:1], 2)
    layer, missing = served.experts._cpu[3], range(GEOMETRY.experts)
    for expert in missing:
        layer.unbind(expert)
    try:
        with pytest.raises(StepError, match="refused"):
            answers(served, prompts[:1], 2)
    finally:
        for expert in missing:
            layer.bind(expert, served.experts._leases[ExpertKey(3, expert)].address)
        served.experts.mailbox.reset()
    assert answers(served, prompts[:1], 2) == want
