"""torch.ops.moet.hybrid_experts and its halves: the CPU op's bits, whatever is on the card."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install moet[cpu]")

from tests.engine.emulated import emulated_card  # noqa: E402
from tests.engine.layer_pair import SPEC, STEP, LayerPair, call  # noqa: E402

from moet.base.errors import EngineError, StepError  # noqa: E402
from moet.engine import hybrid_op  # noqa: E402
from moet.engine.hybrid_op import CardLayer  # noqa: E402
from moet.tiers.api import ExpertKey  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about itself

TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def layer(emulated_library: ctypes.CDLL) -> Iterator[LayerPair]:
    layer = LayerPair(emulated_card(emulated_library))
    yield layer
    layer.close()
    layer.card.close()
    assert layer.card.gpu.held == {}  # type: ignore[attr-defined]


def on_card(x: Any, weights: Any, ids: Any) -> Any:
    return torch.ops.moet.hybrid_experts(x, weights, ids, "card")


def on_cpu(x: Any, weights: Any, ids: Any) -> Any:
    return torch.ops.moet.routed_experts(x, weights, ids, "cpu")


def in_halves(x: Any, weights: Any, ids: Any) -> Any:
    out = torch.ops.moet.hybrid_start(x, weights, ids, "card")
    torch.ops.moet.hybrid_finish(out, weights, ids, "card")
    return out


@pytest.mark.parametrize("way", [on_card, in_halves])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [0, 1, STEP, 2 * STEP + 1])
def test_the_cpu_ops_bits(layer: LayerPair, way: Any, dtype: Any, tokens: int) -> None:
    x, weights, ids = call(tokens, dtype)
    before = layer.on_card.calls
    out = way(x, weights, ids)
    layer.experts.mailbox.check()
    assert out.dtype is dtype
    assert out.shape == x.shape
    assert torch.equal(out, on_cpu(x, weights, ids))
    assert not tokens or out.any()
    assert layer.on_card.calls == before + 1


def test_strides_types_and_addresses_do_not_matter(layer: LayerPair) -> None:
    x, weights, ids = call(3)
    want = on_cpu(x, weights, ids)
    wide = torch.zeros(3, 2 * SPEC.hidden, dtype=torch.bfloat16)
    wide[:, ::2] = x
    assert torch.equal(on_card(wide[:, ::2], weights.T.contiguous().T, ids.long()), want)
    flat = torch.zeros(1 + x.numel(), dtype=torch.bfloat16)
    flat[1:] = x.flatten()
    shifted = flat[1:].view_as(x)
    assert shifted.data_ptr() % 16
    assert torch.equal(on_card(shifted, weights, ids), want)


def test_empty_slots(layer: LayerPair) -> None:
    x, weights, ids = call(3)
    ids[1] = -1
    out = on_card(x, weights, ids)
    assert not out[1].any()
    assert torch.equal(out, on_cpu(x, weights, ids))


def test_something_else_runs_between_the_halves(layer: LayerPair) -> None:
    x, weights, ids = call(2 * STEP)
    out = torch.ops.moet.hybrid_start(x, weights, ids, "card")
    shared = x * 2
    torch.ops.moet.hybrid_finish(out, weights, ids, "card")
    assert torch.equal(out + shared, on_cpu(x, weights, ids) + x * 2)


def test_a_second_half_without_a_first_is_an_error(layer: LayerPair) -> None:
    x, weights, ids = call(2)
    with pytest.raises(EngineError, match="where nothing had begun"):
        torch.ops.moet.hybrid_finish(torch.empty_like(x), weights, ids, "card")
    out = torch.ops.moet.hybrid_start(x, weights, ids, "card")
    with pytest.raises(EngineError, match="call of 1 tokens, where a call of 2 tokens had begun"):
        torch.ops.moet.hybrid_finish(out[:1], weights[:1], ids[:1], "card")
    assert torch.equal(on_card(x, weights, ids), on_cpu(x, weights, ids)), "still in order"


@pytest.mark.parametrize("way", [on_card, in_halves])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_graphs_keep_the_ops_whole(layer: LayerPair, way: Any, backend: str) -> None:
    def block(x: Any, weights: Any, ids: Any) -> Any:
        return way(x * 2, weights, ids) + 1

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (2, 3, 6):
        x, weights, ids = call(tokens)
        assert torch.equal(compiled(x, weights, ids), on_cpu(x * 2, weights, ids) + 1)


@pytest.mark.parametrize("name", ["hybrid_experts", "hybrid_start"])
def test_the_fakes_have_the_ops_shapes(layer: LayerPair, name: str) -> None:
    torch.library.opcheck(
        getattr(torch.ops.moet, name), (*call(2), "card"), test_utils=("test_schema",)
    )
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(5, SPEC.hidden, dtype=torch.float16, device="cuda")
        weights = torch.empty(5, SPEC.top_k, device="cuda")
        out = getattr(torch.ops.moet, name)(x, weights, weights.int(), "card")
        assert (out.shape, out.dtype, out.device.type) == (x.shape, x.dtype, "cuda")
        assert torch.ops.moet.hybrid_finish(out, weights, weights.int(), "card") is None


@pytest.mark.parametrize("wrong", ["hidden", "slots", "ids", "type", "id type", "weight type"])
def test_a_call_of_another_shape_is_refused(layer: LayerPair, wrong: str) -> None:
    x, weights, ids = call(3)
    given = {
        "hidden": (x[:, :64], weights, ids),
        "slots": (x, weights[:, :2], ids[:, :2]),
        "ids": (x, weights, ids[:2]),
        "type": (x.double(), weights, ids),
        "id type": (x, weights, ids.float()),
        "weight type": (x, weights.int(), ids),
    }[wrong]
    before = layer.on_card.calls
    with pytest.raises(EngineError, match=r"the layer got x .* it is made for"):
        on_card(*given)
    assert layer.on_card.calls == before


def test_tensors_of_another_device_are_refused() -> None:
    class Nowhere:
        spec, most_tokens = SPEC, STEP

    elsewhere = CardLayer("on a card", Nowhere(), torch.device("cuda", 1))  # type: ignore[arg-type]
    hybrid_op.attach("elsewhere", elsewhere)
    with pytest.raises(EngineError, match=r"x .* on cpu.* all on cuda:1"):
        torch.ops.moet.hybrid_experts(*call(1), "elsewhere")


def test_a_layer_that_is_not_there_is_an_error() -> None:
    with pytest.raises(EngineError, match="nobody runs before moet has loaded"):
        torch.ops.moet.hybrid_experts(*call(1), "nobody")


def test_what_the_cpu_refuses_is_an_error_at_the_check(layer: LayerPair) -> None:
    """An expert that is nowhere: the token is NaN, and who checks is told."""
    x, weights, ids = call(2)
    cpu = layer.experts._cpu[0]
    cpu.unbind(0)
    ids[1, 0] = 0
    try:
        out = on_card(x, weights, ids)
        with pytest.raises(StepError, match="refused"):
            layer.experts.mailbox.check()
        assert out[1].isnan().all()
    finally:
        lease = layer.experts._leases[ExpertKey(0, 0)]
        cpu.bind(0, lease.address)
        layer.experts.mailbox.reset()
    assert torch.equal(on_card(x, weights, ids), on_cpu(x, weights, ids))
