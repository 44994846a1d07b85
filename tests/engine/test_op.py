"""torch.ops.moet.routed_experts: opaque, the same eager and compiled, any type and stride."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install moet[cpu]")

from moet.base.errors import EngineError, KernelError  # noqa: E402
from moet.engine import op  # noqa: E402
from moet.engine.live import LiveLayer  # noqa: E402
from moet.hybrid.experts import plan  # noqa: E402
from moet.hybrid.reference import ReferenceExperts  # noqa: E402
from moet.kernels.cpu import Pool  # noqa: E402
from moet.kernels.spec import ActFormat, LayerSpec  # noqa: E402
from moet.tiers.api import ExpertKey  # noqa: E402
from moet.tiers.ram import RamTier  # noqa: E402
from moet.verify.cases import LayerCase  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about itself

SPEC = LayerSpec(hidden=96, intermediate=64, experts=7, top_k=3, act=ActFormat.MXINT16)
KEY = "0/model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def tier() -> RamTier:
    case = LayerCase.random(np.random.default_rng(3), SPEC)
    tier = RamTier(case.records.size, populate=False)
    for expert, record in enumerate(case.records):
        tier.put(ExpertKey(0, expert), record)
    return tier


def bind(computer: Any, tier: RamTier) -> LiveLayer:
    computer.bind(tier.acquire(ExpertKey(0, e)) for e in range(SPEC.experts))
    return LiveLayer("model.layers.0.mlp.experts", computer)


@pytest.fixture
def layer(tier: RamTier) -> LiveLayer:
    live = bind(plan(SPEC, 64, Pool(2)), tier)
    op.attach(KEY, live)
    return live


def routed(x: Any, weights: Any, ids: Any, key: str = KEY) -> Any:
    return torch.ops.moet.routed_experts(x, weights, ids, key)


def call(tokens: int, dtype: Any) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, SPEC.hidden, generator=generator).to(dtype)
    weights = torch.rand(tokens, SPEC.top_k, generator=generator)
    ids = torch.randint(0, SPEC.experts, (tokens, SPEC.top_k), generator=generator)
    return x, weights, ids.int()


def expected(tier: RamTier, x: Any, weights: Any, ids: Any) -> Any:
    op.attach("twin", twin := bind(ReferenceExperts(SPEC), tier))
    out = routed(x, weights, ids, "twin")
    assert twin.calls == 1
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_types_of_the_engine(layer: LiveLayer, tier: RamTier, dtype: Any, tokens: int) -> None:
    x, weights, ids = call(tokens, dtype)
    out = routed(x, weights, ids)
    assert out.dtype is dtype
    assert out.shape == x.shape
    assert torch.equal(out, expected(tier, x, weights, ids))
    assert layer.calls == 1


def test_strides_and_wider_ids_do_not_matter(layer: LiveLayer, tier: RamTier) -> None:
    x, weights, ids = call(6, torch.bfloat16)
    wide = torch.zeros(6, 2 * SPEC.hidden, dtype=torch.bfloat16)
    wide[:, ::2] = x
    out = routed(wide[:, ::2], weights.T.contiguous().T, ids.long())
    assert torch.equal(out, expected(tier, x, weights, ids))
    assert layer.calls == 1


def test_empty_slots(layer: LiveLayer, tier: RamTier) -> None:
    x, weights, ids = call(4, torch.bfloat16)
    ids[1] = -1
    out = routed(x, weights, ids)
    assert not out[1].any()
    assert out[0].any()
    assert torch.equal(out, expected(tier, x, weights, ids))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_graphs_keep_the_op_whole(layer: LiveLayer, tier: RamTier, backend: str) -> None:
    """What surrounds the op is compiled, for any number of tokens; what it computes is not."""

    def block(x: Any, weights: Any, ids: Any) -> tuple[Any, Any]:
        x = x * 2
        out = routed(x, weights, ids)
        return x, out

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (2, 3, 17):
        x, weights, ids = call(tokens, torch.bfloat16)
        doubled, out = compiled(x, weights, ids)
        assert torch.equal(doubled, x * 2)
        assert torch.equal(out, expected(tier, doubled, weights, ids))
    assert layer.calls == 3


def test_a_layer_that_is_not_there_is_an_error() -> None:
    x, weights, ids = call(1, torch.bfloat16)
    with pytest.raises(EngineError, match="nobody runs before moet has loaded"):
        routed(x, weights, ids, "nobody")


def test_layers_end_with_their_model(tier: RamTier) -> None:
    op.attach("brief", live := bind(ReferenceExperts(SPEC), tier))
    del live
    with pytest.raises(EngineError, match="brief"):
        routed(*call(1, torch.bfloat16), "brief")


def test_bad_ids_are_an_error(layer: LiveLayer) -> None:
    x, weights, ids = call(2, torch.bfloat16)
    ids[1, 1] = SPEC.experts
    with pytest.raises(KernelError, match="7"):
        routed(x, weights, ids)
    assert layer.calls == 1


@pytest.mark.parametrize("wrong", ["hidden", "slots", "ids", "type"])
def test_a_call_of_another_shape_is_refused(layer: LiveLayer, wrong: str) -> None:
    x, weights, ids = call(3, torch.bfloat16)
    given = {
        "hidden": (x[:, :64], weights, ids),
        "slots": (x, weights[:, :2], ids[:, :2]),
        "ids": (x, weights, ids[:2]),
        "type": (x.double(), weights, ids),
    }[wrong]
    before = layer.calls
    with pytest.raises(EngineError, match="it is made for"):
        routed(*given)
    assert layer.calls == before
