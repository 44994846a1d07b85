"""The hot path: plan, bind, run; the same bits whatever the threads, the batch and the twin."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moet.base.errors import KernelError, TierError
from moet.checkpoint import Checkpoint, open_checkpoint
from moet.hybrid import experts
from moet.hybrid.experts import Experts, plan, tokens_a_step
from moet.hybrid.load import load, record_layout, tier_bytes
from moet.hybrid.reference import ReferenceExperts
from moet.kernels.cpu import Pool, isa_available
from moet.kernels.spec import ActFormat, DType, GateKind, LayerSpec
from moet.testing.toy import write_toy_checkpoint
from moet.tiers.api import ExpertKey
from moet.tiers.ram import RamTier
from moet.verify.cases import random_routing, random_x, widened

SIZES = {"hidden": 96, "intermediate": 128, "experts": 6, "layers": 2, "top_k": 3}
FAMILIES = {"qwen3_moe": GateKind.SILU, "gpt_oss": GateKind.GPT_OSS, "deepseek_v4": GateKind.SILU}

Computer = Experts | ReferenceExperts


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    path: Path = tmp_path_factory.mktemp(request.param)
    write_toy_checkpoint(path, request.param, **SIZES)
    return open_checkpoint(path)


def spec_of(checkpoint: Checkpoint, rank: int = 0, world: int = 1) -> LayerSpec:
    model = checkpoint.geometry
    return LayerSpec(
        hidden=model.hidden,
        intermediate=record_layout(model, rank, world).intermediate,
        experts=model.experts,
        top_k=model.top_k,
        act=model.act,
        gate=model.gate,
        limit=model.limit,
        biased=model.biased,
    )


def loaded(checkpoint: Checkpoint, rank: int = 0, world: int = 1) -> RamTier:
    tier = RamTier(tier_bytes(checkpoint.geometry, rank, world), populate=False)
    load(checkpoint, tier, rank=rank, world=world)
    return tier


def bound(computer: Computer, tier: RamTier, layer: int = 1) -> Computer:
    computer.bind(tier.acquire(ExpertKey(layer, e)) for e in range(computer.spec.experts))
    assert computer.bound == computer.spec.experts
    return computer


def run(
    computer: Computer, x: NDArray[Any], ids: NDArray[np.int32], weights: NDArray[np.float32]
) -> NDArray[Any]:
    dtype = {np.float32: DType.F32, np.uint16: DType.BF16, np.float16: DType.F16}[x.dtype.type]
    out = np.empty_like(x)
    computer.run(
        x=x.ctypes.data,
        dtype=dtype,
        tokens=x.shape[0],
        weights=weights.ctypes.data,
        ids=ids.ctypes.data,
        out=out.ctypes.data,
    )
    return out


@pytest.mark.parametrize("dtype", DType)
def test_kernels_and_reference_agree_on_every_bit(checkpoint: Checkpoint, dtype: DType) -> None:
    spec, tier = spec_of(checkpoint), loaded(checkpoint)
    rng = np.random.default_rng(7)
    x = random_x(rng, 9, spec.hidden, dtype)
    ids, weights = random_routing(rng, 9, spec)
    expected = run(bound(ReferenceExperts(spec), tier), x, ids, weights)
    assert np.isfinite(widened(expected)).all()
    assert len(np.unique(expected)) > expected.size // 8, "an output worth comparing"
    for isa in isa_available():
        for threads in (1, 2):
            computer = bound(plan(spec, 9, Pool(threads), isa), tier)
            assert run(computer, x, ids, weights).tobytes() == expected.tobytes(), (isa, threads)
            assert computer.ran_isa == isa  # type: ignore[union-attr]


@pytest.mark.parametrize("tokens", [0, 1, 2, 63, 64, 65, 200])
def test_a_batch_may_be_cut_anywhere(checkpoint: Checkpoint, tokens: int) -> None:
    spec, tier, pool = spec_of(checkpoint), loaded(checkpoint), Pool(2)
    rng = np.random.default_rng(tokens)
    x = random_x(rng, tokens, spec.hidden, DType.BF16)
    ids, weights = random_routing(rng, tokens, spec)
    whole = run(bound(plan(spec, 200, pool), tier), x, ids, weights)
    cut = run(bound(plan(spec, 5, pool), tier), x, ids, weights)
    one = bound(plan(spec, 1, pool), tier)
    single = [run(one, x[t : t + 1], ids[t : t + 1], weights[t : t + 1]) for t in range(tokens)]
    assert whole.tobytes() == cut.tobytes() == b"".join(row.tobytes() for row in single)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_compute_slices_of_one_sum(checkpoint: Checkpoint, world: int) -> None:
    """Each rank holds its slice only, and the slices add up to the whole layer, biases once."""
    rng = np.random.default_rng(world)
    spec = spec_of(checkpoint)
    x = random_x(rng, 8, spec.hidden, DType.F32)
    ids, weights = random_routing(rng, 8, spec)
    whole = run(bound(ReferenceExperts(spec), loaded(checkpoint)), x, ids, weights)
    total, pool, channels = np.zeros_like(whole), Pool(1), 0
    for rank in range(world):
        part, tier = spec_of(checkpoint, rank, world), loaded(checkpoint, rank, world)
        channels += part.intermediate
        total += run(bound(plan(part, 8, pool), tier), x, ids, weights)
    assert channels == spec.intermediate
    # h is quantised per slice with the same blocks of 32, so only the rounding of sums differs
    # (rows are bf16 in the 8-bit family).
    scale = np.abs(whole).max()
    assert np.abs(total - whole).max() <= scale * (2**-7 if spec.rows_bf16 else 2**-20)


def test_a_step_allocates_nothing(checkpoint: Checkpoint) -> None:
    spec, pool = spec_of(checkpoint), Pool(2)
    computer = bound(plan(spec, 16, pool), loaded(checkpoint))
    rng = np.random.default_rng(1)
    x = random_x(rng, 16, spec.hidden, DType.BF16)
    ids, weights = random_routing(rng, 16, spec)
    out = np.empty_like(x)
    raw = {"x": x.ctypes.data, "ids": ids.ctypes.data, "weights": weights.ctypes.data}
    raw |= {"dtype": DType.BF16, "tokens": 16, "out": out.ctypes.data}
    computer.run(**raw)  # type: ignore[arg-type]
    workspace = pool.core.workspace_bytes
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(100):
            computer.run(**raw)  # type: ignore[arg-type]
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 1024, "100 steps leave nothing behind"
    assert pool.core.workspace_bytes == workspace


def test_experts_of_another_geometry_are_refused(checkpoint: Checkpoint) -> None:
    spec, tier = spec_of(checkpoint), loaded(checkpoint, 0, 2)
    with pytest.raises(TierError, match=r"the record of .* has \d+ bytes, not \d+"):
        bound(plan(spec, 1, Pool(1)), tier)


def test_an_unbound_expert_is_an_error_not_a_zero(checkpoint: Checkpoint) -> None:
    spec, tier = spec_of(checkpoint), loaded(checkpoint)
    computer = plan(spec, 1, Pool(1))
    computer.bind([tier.acquire(ExpertKey(0, 0))])
    x = np.ones((1, spec.hidden), np.float32)
    weights = np.ones((1, spec.top_k), np.float32)
    with pytest.raises(KernelError, match="expert"):
        run(computer, x, np.full((1, spec.top_k), 1, np.int32), weights)
    assert run(computer, x, np.zeros((1, spec.top_k), np.int32), weights).any()


def test_bound_leases_keep_their_records(checkpoint: Checkpoint) -> None:
    spec, tier = spec_of(checkpoint), loaded(checkpoint)
    computer = bound(plan(spec, 1, Pool(1)), tier, layer=0)
    with pytest.raises(TierError, match="leased"):
        tier.evict(ExpertKey(0, 3))
    del computer


def test_leases_go_back_when_they_are_replaced_and_at_the_end(checkpoint: Checkpoint) -> None:
    spec, tier = spec_of(checkpoint), loaded(checkpoint)
    computer = plan(spec, 1, Pool(1))
    bound(computer, tier, layer=0)
    bound(computer, tier, layer=1)
    assert tier.stats().leases == spec.experts
    same = tier.acquire(ExpertKey(1, 0))
    computer.bind([same])
    computer.bind([same])
    tier.evict(ExpertKey(0, 3))
    computer.close()
    computer.close()
    assert (computer.bound, tier.stats().leases) == (0, 0)
    x, ids = np.ones((1, spec.hidden), np.float32), np.zeros((1, spec.top_k), np.int32)
    with pytest.raises(KernelError, match="expert"):
        run(computer, x, ids, np.ones((1, spec.top_k), np.float32))
    tier.close()


def test_scratch_bounds_the_step() -> None:
    spec = LayerSpec(hidden=4096, intermediate=2048, experts=8, top_k=6, act=ActFormat.MXINT8)
    assert tokens_a_step(spec, 10**6) == experts.SCRATCH_BYTES // (8 * 6 * 6144)
    assert tokens_a_step(spec, 17) == 17
    assert tokens_a_step(spec, 0) == 1
    huge = LayerSpec(hidden=1 << 19, intermediate=2048, experts=64, top_k=60, act=ActFormat.MXINT8)
    assert tokens_a_step(huge, 10**6) == 64
    small = LayerSpec(hidden=32, intermediate=32, experts=8, top_k=1, act=ActFormat.MXINT16)
    assert tokens_a_step(small, 10**6) == 65_535
    assert plan(small, 10**6, Pool(1)).spec == small  # as many as the core takes
