"""The CPU layer against the reference, bit for bit: shapes, threads, batches, vocabularies."""

from __future__ import annotations

import ctypes
import ctypes.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moet.base.errors import KernelError
from moet.formats.gate import GateKind
from moet.formats.mxint import ActFormat
from moet.kernels import reference
from moet.kernels.cpu import CpuLayer, Pool, default_cpus, isa_available
from moet.kernels.rounding import round_output
from moet.kernels.spec import DType, LayerSpec
from moet.verify.cases import (
    PLAIN_SCALES,
    WILD_SCALES,
    LayerCase,
    random_routing,
    random_x,
    widened,
)

ISAS = isa_available()
FE_UPWARD = 0x800
POOLS = {threads: Pool(threads, default_cpus()) for threads in (1, 2, 3)}

Array = NDArray[Any]


def raw(a: Array) -> bytes:
    return np.ascontiguousarray(a).tobytes()


def expected(
    case: LayerCase, x: Array, ids: Array, weights: Array, out_type: DType = DType.F32
) -> bytes:
    out = reference.moe_layer(case.spec, widened(x), ids.astype(np.int32), weights, case.experts)
    return raw(round_output(out, out_type))


widths = st.integers(1, 9).map(lambda blocks: 32 * blocks)


@st.composite
def specs(draw: st.DrawFn) -> LayerSpec:
    experts = draw(st.integers(1, 6))
    gate = draw(st.sampled_from(GateKind))
    return LayerSpec(
        hidden=draw(widths),
        intermediate=draw(widths),
        experts=experts,
        top_k=draw(st.integers(1, experts)),
        act=draw(st.sampled_from(ActFormat)),
        gate=gate,
        limit=draw(st.sampled_from([None, 7.0, 0.5])),
        biased=draw(st.booleans()),
        output_scale=draw(st.sampled_from([None, 1.5, 0.3])),
    )


@dataclass(frozen=True)
class Call:
    seed: int
    tokens: int
    max_tokens: int
    x_type: DType
    out_type: DType
    wild: bool
    threads: int


calls = st.builds(
    Call,
    seed=st.integers(0, 2**32),
    tokens=st.integers(1, 9),
    max_tokens=st.integers(1, 9),
    x_type=st.sampled_from(DType),
    out_type=st.sampled_from(DType),
    wild=st.booleans(),
    threads=st.sampled_from(sorted(POOLS)),
)


@settings(max_examples=60, deadline=None)
@given(spec=specs(), call=calls)
def test_any_shape_equals_the_reference(spec: LayerSpec, call: Call) -> None:
    rng = np.random.default_rng(call.seed)
    case = LayerCase.random(rng, spec, WILD_SCALES if call.wild else PLAIN_SCALES)
    x = random_x(rng, call.tokens, spec.hidden, call.x_type, call.wild)
    ids, weights = random_routing(rng, call.tokens, spec)
    want = expected(case, x, ids, weights, call.out_type)
    for isa in ISAS:
        layer = case.layer(POOLS[call.threads], isa, call.max_tokens)
        assert raw(layer.run(x, ids, weights, call.out_type)) == want
        assert layer.ran_isa == isa


REAL = {
    "deepseek-v4-flash": {"hidden": 4096, "intermediate": 2048, "limit": 10.0},
    "deepseek-v4.1-flash": {"hidden": 5120, "intermediate": 2304, "limit": 10.0},
    "gpt-oss": {
        "hidden": 2880,
        "intermediate": 2880,
        "limit": 7.0,
        "biased": True,
        "gate": GateKind.GPT_OSS,
    },
    "half of an expert, TP 2 of 1440": {"hidden": 2048, "intermediate": 736},
}


@pytest.mark.parametrize("act", ActFormat)
@pytest.mark.parametrize("name", REAL)
def test_real_widths_equal_the_reference(name: str, act: ActFormat) -> None:
    rng = np.random.default_rng(7)
    spec = LayerSpec(experts=2, top_k=2, act=act, **REAL[name])
    case = LayerCase.random(rng, spec)
    x = random_x(rng, 5, spec.hidden, DType.BF16)
    ids, weights = random_routing(rng, 5, spec)
    want = expected(case, x, ids, weights, DType.BF16)
    for isa in ISAS:
        for threads in (1, 2):
            layer = case.layer(POOLS[threads], isa)
            assert raw(layer.run(x, ids, weights, DType.BF16)) == want


@pytest.fixture(scope="module", params=list(ActFormat), ids=lambda a: a.name)
def shared(request: pytest.FixtureRequest) -> tuple[LayerCase, Array, Array, Array, Array]:
    """A layer, a batch of 130 tokens (some experts get more than 64 of them), its output."""
    rng = np.random.default_rng(3)
    spec = LayerSpec(
        hidden=352, intermediate=224, experts=5, top_k=3, act=request.param, limit=10.0
    )
    case = LayerCase.random(rng, spec)
    x = random_x(rng, 130, spec.hidden, DType.F32)
    ids, weights = random_routing(rng, 130, spec)
    assert max(np.bincount(ids[ids >= 0])) > 64
    return case, x, ids, weights, case.layer(POOLS[1], "portable", 130).run(x, ids, weights)


Shared = tuple[LayerCase, Array, Array, Array, Array]


def test_the_shared_batch_equals_the_reference(shared: Shared) -> None:
    case, x, ids, weights, out = shared
    assert raw(out) == expected(case, x, ids, weights)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", sorted(POOLS))
@pytest.mark.parametrize("max_tokens", [1, 7, 64, 130])
def test_threads_and_steps_change_no_bit(
    shared: Shared, isa: str, threads: int, max_tokens: int
) -> None:
    case, x, ids, weights, out = shared
    layer = case.layer(POOLS[threads], isa, max_tokens)
    for _ in range(3):
        assert raw(layer.run(x, ids, weights)) == raw(out)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8, 13, 16, 31, 33, 64])
def test_a_token_does_not_know_its_batch(shared: Shared, isa: str, batch: int) -> None:
    case, x, ids, weights, out = shared
    layer = case.layer(POOLS[2], isa)
    order = np.random.default_rng(batch).permutation(len(x))
    for first in range(0, len(x), batch):
        part = order[first : first + batch]
        assert raw(layer.run(x[part], ids[part], weights[part])) == raw(out[part])


def test_int64_ids_are_the_same_ids(shared: Shared) -> None:
    case, x, ids, weights, out = shared
    layer = case.layer(POOLS[2])
    assert raw(layer.run(x, ids.astype(np.int64), weights)) == raw(out)


def test_fewer_slots_than_planned(shared: Shared) -> None:
    case, x, ids, weights, _ = shared
    part = case.layer(POOLS[2]).run(x, ids[:, :2], weights[:, :2])
    padded = ids.copy()
    padded[:, 2] = -1
    assert raw(part) == expected(case, x, padded, weights)


def test_empty_slots_read_nothing_even_where_the_scratch_is_full_of_nan(shared: Shared) -> None:
    case, x, ids, weights, out = shared
    layer = case.layer(POOLS[2])
    layer.run(np.full_like(x, np.nan), np.abs(ids), weights)
    assert raw(layer.run(x, ids, weights)) == raw(out)
    nothing = layer.run(x, np.full_like(ids, -1), weights)
    assert raw(nothing) == bytes(nothing.nbytes)  # +0


def test_one_poisoned_token_spoils_no_other(shared: Shared) -> None:
    case, x, ids, weights, _ = shared
    spoilt = x.copy()
    spoilt[17, 100] = np.inf
    got = case.layer(POOLS[2]).run(spoilt, np.abs(ids), weights)
    clean = case.layer(POOLS[2]).run(x, np.abs(ids), weights)
    assert (got[17].view(np.uint32) == 0x7FFFFFFF).all()
    others = np.arange(len(x)) != 17
    assert raw(got[others]) == raw(clean[others])


def test_the_callers_rounding_mode_is_put_aside_and_given_back(shared: Shared) -> None:
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    case, x, ids, weights, out = shared
    layer = case.layer(POOLS[2])
    before = libm.fegetround()
    assert libm.fesetround(FE_UPWARD) == 0
    try:
        got = layer.run(x, ids, weights)
        kept = libm.fegetround()
    finally:
        libm.fesetround(before)
    assert kept == FE_UPWARD
    assert raw(got) == raw(out)


def test_an_unbound_expert_is_refused_before_anything_is_computed(shared: Shared) -> None:
    case, x, ids, weights, out = shared
    layer = case.layer(POOLS[2], max_tokens=16)
    layer.unbind(4)
    token = int(np.argwhere(ids == 4)[0][0])
    x, ids, weights = (np.roll(a, -token - 1, axis=0) for a in (x, ids, weights))
    target = np.full(x.shape, 7, np.float32)
    with pytest.raises(KernelError, match=r"expert 4 \(token \d+, slot \d\) is not bound"):
        run_into(layer, x, ids, weights, target)
    assert (target == 7).all()
    layer.bind(4, case.records[4].ctypes.data)
    run_into(layer, x, ids, weights, target)
    assert raw(target) == raw(np.roll(out, -token - 1, axis=0))


def run_into(layer: CpuLayer, x: Array, ids: Array, weights: Array, out: Array) -> None:
    layer.run_at(
        x=x.ctypes.data,
        x_type=DType.F32,
        tokens=len(x),
        ids=ids.ctypes.data,
        weights=weights.ctypes.data,
        slots=ids.shape[1],
        out=out.ctypes.data,
        out_type=DType.F32,
    )


def test_foreign_experts_are_skipped(shared: Shared) -> None:
    case, x, ids, weights, _ = shared
    layer = case.layer(POOLS[2])
    for expert in (1, 3):
        layer.mark_foreign(expert)
    own = {e: w for e, w in case.experts.items() if e not in (1, 3)}
    want = reference.moe_layer(case.spec, x, ids, weights, own)
    assert raw(layer.run(x, ids, weights)) == raw(want)


def test_layers_of_different_shapes_share_one_pool(shared: Shared) -> None:
    case, x, ids, weights, out = shared
    layer = case.layer(POOLS[2])
    other = LayerCase.random(np.random.default_rng(5), replace(case.spec, hidden=1024, experts=9))
    big = other.layer(POOLS[2], max_tokens=200)
    assert big.workspace_bytes > layer.workspace_bytes
    x_other = random_x(np.random.default_rng(6), 4, 1024, DType.F32)
    for _ in range(2):
        assert raw(layer.run(x, ids, weights)) == raw(out)
        assert raw(big.run(x_other, ids[:4], weights[:4])) == expected(
            other, x_other, ids[:4], weights[:4]
        )


def test_a_short_step_wakes_nobody() -> None:
    """A worker that sleeps would come too late: waking it costs the caller more than it brings."""
    rng = np.random.default_rng(2)
    pool = Pool(2, default_cpus())
    spec = LayerSpec(hidden=64, intermediate=64, experts=4, top_k=2, act=ActFormat.MXINT8)
    case = LayerCase.random(rng, spec)
    layer = case.layer(pool)
    ids, weights = random_routing(rng, 3, spec)
    x = random_x(rng, 3, 64, DType.F32)

    def turns() -> int:
        text = Path(f"/proc/self/task/{pool.core.thread_ids[0]}/schedstat").read_text()
        return int(text.split()[2])

    before = turns()
    for _ in range(50):
        layer.run(x, ids, weights)
    assert turns() == before


def test_no_token_is_no_work(shared: Shared) -> None:
    case, x, ids, weights, _ = shared
    layer = case.layer(POOLS[2])
    assert layer.run(x[:0], ids[:0], weights[:0]).shape == (0, case.spec.hidden)
    assert layer.ran_isa is None


@pytest.mark.parametrize("bad", [5, 2**31 - 1])
def test_ids_past_the_last_expert_are_refused(shared: Shared, bad: int) -> None:
    case, x, ids, weights, _ = shared
    ids = ids.copy()
    ids[9, 2] = bad
    message = rf"expert id {bad} of token 9, slot 2 is outside 0\.\.4"
    with pytest.raises(KernelError, match=message):
        case.layer(POOLS[2]).run(x, ids, weights)


def test_wide_ids_are_not_cut_to_32_bits(shared: Shared) -> None:
    case, x, ids, weights, _ = shared
    wide = ids.astype(np.int64)
    wide[0, 0] = 2**32
    with pytest.raises(KernelError, match="4294967296"):
        case.layer(POOLS[2]).run(x, wide, weights)


def test_calls_that_do_not_fit_are_refused(shared: Shared) -> None:
    case, x, ids, weights, _ = shared
    layer = case.layer(POOLS[2])
    calls: list[tuple[str, Array, Array, Array]] = [
        ("x is float32", x[:, :-32], ids, weights),
        ("x is float32", x[:-1], ids, weights),
        ("x is float64", x.astype(np.float64), ids, weights),
        ("ids are int16", x, ids.astype(np.int16), weights),
        ("weights float64", x, ids, weights.astype(np.float64)),
        ("weights", x, ids, weights[:, :1]),
        ("slots = 4", x, np.hstack([ids, ids[:, :1]]), np.hstack([weights, weights[:, :1]])),
        ("slots = 0", x, ids[:, :0], weights[:, :0]),
    ]
    for message, *arguments in calls:
        with pytest.raises(KernelError, match=message):
            layer.run(*arguments)
    with pytest.raises(KernelError, match="x has no address"):
        layer.run_at(
            x=0, x_type=DType.F32, tokens=1, ids=64, weights=64, slots=1, out=64,
            out_type=DType.F32,
        )  # fmt: skip
    with pytest.raises(KernelError, match="out is not aligned"):
        layer.run_at(
            x=64, x_type=DType.F32, tokens=1, ids=64, weights=64, slots=1, out=66,
            out_type=DType.F32,
        )  # fmt: skip


def test_records_and_experts_that_are_not_there_are_refused(shared: Shared) -> None:
    case = shared[0]
    layer = case.layer(POOLS[1])
    address = case.records[0].ctypes.data
    for expert in (-1, 5):
        for call in (layer.unbind, layer.mark_foreign, lambda e: layer.bind(e, address)):
            with pytest.raises(KernelError, match=f"expert = {expert}"):
                call(expert)
    for wrong in (0, address + 32):
        with pytest.raises(KernelError, match="64-byte boundary"):
            layer.bind(0, wrong)


def test_plans_that_cannot_be_are_refused() -> None:
    spec = LayerSpec(hidden=64, intermediate=64, experts=100, top_k=4, act=ActFormat.MXINT8)
    for changed, tokens, message in [
        (replace(spec, top_k=65), 1, "top_k = 65"),
        (replace(spec, experts=5000), 1, "experts = 5000"),
        (spec, 0, "max_tokens = 0"),
        (replace(spec, hidden=1 << 21), 1, "hidden = "),
    ]:
        with pytest.raises(KernelError, match=message):
            CpuLayer(changed, POOLS[1], max_tokens=tokens)


@given(hidden=widths, intermediate=widths, biased=st.booleans())
def test_the_core_and_the_format_agree_on_the_record(
    hidden: int, intermediate: int, biased: bool
) -> None:
    spec = LayerSpec(
        hidden=hidden,
        intermediate=intermediate,
        experts=1,
        top_k=1,
        act=ActFormat.MXINT8,
        biased=biased,
    )
    assert CpuLayer(spec, POOLS[1])._core.record_bytes == spec.layout.record_bytes
