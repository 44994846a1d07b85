"""Experts that are read as they are needed: the bits of experts that are all in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from moet.base.errors import KernelError, TierError
from moet.hybrid import experts
from moet.hybrid.cold import ROW_BYTES, ColdExperts, Outcome, RowScratch, plan, rates_of
from moet.kernels.cpu import Pool
from moet.kernels.spec import ActFormat, DType, GateKind, LayerSpec
from moet.testing.below import Finisher, MemoryBelow
from moet.tiers.api import ExpertKey
from moet.tiers.cascade import Cascade
from moet.tiers.policy import POLICIES
from moet.tiers.ram import RamTier
from moet.verify.cases import LayerCase, random_routing, random_x, widened

SPEC = LayerSpec(hidden=96, intermediate=64, experts=8, top_k=3, act=ActFormat.MXINT8)
KINDS = {np.float32: DType.F32, np.uint16: DType.BF16, np.float16: DType.F16}
NAN = {np.float32: 0x7FFFFFFF, np.uint16: 0x7FFF, np.float16: 0x7FFF}


@dataclass
class Model:
    """A layer of random experts, in memory for the judge and below a cascade for the judged."""

    case: LayerCase
    judge: experts.Experts
    below: MemoryBelow
    pool: Pool

    @classmethod
    def make(cls, spec: LayerSpec, seed: int = 0, layer: int = 3) -> Model:
        case = LayerCase.random(np.random.default_rng(seed), spec)
        pool = Pool(2)
        tier = RamTier(case.records.size, populate=False)
        keys = [ExpertKey(layer, e) for e in range(spec.experts)]
        for key in keys:
            tier.put(key, case.records[key.expert])
        judge = experts.plan(spec, 64, pool)
        judge.bind(tier.acquire(key) for key in keys)
        below = MemoryBelow({key: case.records[key.expert] for key in keys})
        return cls(case, judge, below, pool)

    @property
    def record(self) -> int:
        return self.case.spec.layout.record_bytes

    @contextmanager
    def cold(
        self, budget: int, rows: int = ROW_BYTES, **options: Any
    ) -> Iterator[tuple[ColdExperts, Cascade]]:
        """Cold experts with memory for ``budget`` of them."""
        watch = options.pop("watch", None)
        with Cascade(self.below, budget * self.record, **options) as cascade:
            scratch = RowScratch(rows)
            yield (
                plan(
                    3,
                    self.case.spec,
                    64,
                    self.pool,
                    cascade=cascade,
                    scratch=scratch,
                    watch=watch,
                ),
                cascade,
            )
            assert cascade.stats().leases == 0


Call = tuple[NDArray[Any], NDArray[np.int32], NDArray[np.float32]]


def random_call(rng: np.random.Generator, tokens: int, spec: LayerSpec, dtype: DType) -> Call:
    ids, weights = random_routing(rng, tokens, spec)
    return random_x(rng, tokens, spec.hidden, dtype), ids, weights


def run(
    computer: ColdExperts | experts.Experts, call: Call, **options: Any
) -> tuple[NDArray[Any], Outcome]:
    x, ids, weights = call
    out = np.full_like(x, 1)
    outcome = computer.run(
        x=x.ctypes.data,
        dtype=KINDS[x.dtype.type],
        tokens=len(x),
        weights=weights.ctypes.data,
        ids=ids.ctypes.data,
        out=out.ctypes.data,
        **options,
    )
    return out, outcome or Outcome()


@pytest.mark.parametrize("act", ActFormat)
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8])
def test_any_budget_has_the_bits_of_all_in_memory(
    budget: int, dtype: DType, act: ActFormat
) -> None:
    spec = LayerSpec(hidden=96, intermediate=64, experts=8, top_k=3, act=act, output_scale=1.5)
    model = Model.make(spec, seed=budget)
    rng = np.random.default_rng(budget)
    with model.cold(budget) as (cold, cascade):
        for tokens, prefill in ((1, False), (40, True), (1, False), (7, False), (0, True)):
            call = random_call(rng, tokens, spec, dtype)
            before = call[1].copy()
            wanted, _ = run(model.judge, call)
            got, outcome = run(cold, call, prefill=prefill)
            assert got.tobytes() == wanted.tobytes()
            assert not outcome.poisoned
            assert not outcome.failed
            assert np.array_equal(call[1], before), "the caller's routing is its own"
        assert cascade.stats().resident <= budget


@pytest.mark.parametrize(
    "spec",
    [
        LayerSpec(
            hidden=64,
            intermediate=96,
            experts=5,
            top_k=2,
            act=ActFormat.MXINT16,
            gate=GateKind.GPT_OSS,
            limit=7.0,
            biased=True,
        ),
        LayerSpec(hidden=32, intermediate=32, experts=1, top_k=1, act=ActFormat.MXINT8),
    ],
    ids=["gpt-oss", "one"],
)
def test_other_layers_too(spec: LayerSpec) -> None:
    model = Model.make(spec)
    call = random_call(np.random.default_rng(1), 21, spec, DType.BF16)
    with model.cold(1) as (cold, _):
        assert run(cold, call)[0].tobytes() == run(model.judge, call)[0].tobytes()
        assert cold.bound == spec.experts
        assert cold.ran_isa


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_arrivals_in_any_order_and_any_mix_of_tokens(data: st.DataObject) -> None:
    """Held reads end in random order beside the computing; calls mix prefill and decode, and are
    cut where rows would take too much."""
    seed = data.draw(st.integers(0, 1 << 30))
    rng = np.random.default_rng(seed)
    model = MODEL
    model.below.held = True
    policy = POLICIES[data.draw(st.sampled_from(sorted(POLICIES)))]
    budget, rows = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([1, 5000, ROW_BYTES]))
    with Finisher(model.below, seed), model.cold(budget, rows, policy=policy) as (cold, _):
        for tokens in data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4)):
            call = random_call(rng, tokens, SPEC, DType.BF16)
            prefill = rng.random(tokens) < 0.5
            assert (
                run(cold, call, prefill=prefill)[0].tobytes() == run(model.judge, call)[0].tobytes()
            )


MODEL = Model.make(SPEC)


@pytest.mark.parametrize("budget", [1, 3, 8])
@pytest.mark.parametrize("dtype", DType)
def test_failures_poison_the_tokens_that_need_the_expert_and_no_others(
    budget: int, dtype: DType
) -> None:
    model = Model.make(SPEC)
    bad = {ExpertKey(3, 2), ExpertKey(3, 5)}
    model.below.fails = lambda key: key in bad
    call = random_call(np.random.default_rng(2), 30, SPEC, dtype)
    wanted, _ = run(model.judge, call)
    lacking = np.isin(call[1], [2, 5]).any(axis=1)
    assert 5 < lacking.sum() < 25
    with model.cold(budget, rows=7 * 600) as (cold, cascade):
        for _ in range(2):
            got, outcome = run(cold, call)
            assert got[~lacking].tobytes() == wanted[~lacking].tobytes()
            bits = got.view(np.uint32 if dtype is DType.F32 else np.uint16)
            assert (bits[lacking] == NAN[got.dtype.type]).all(), "canonical NaN"
            assert [*outcome.poisoned] == np.flatnonzero(lacking).tolist()
            for token, keys in outcome.poisoned.items():
                assert {key.expert for key in keys} == {2, 5} & set(call[1][token])
            assert outcome.failed.keys() == bad
            assert all("failed on purpose" in str(error) for error in outcome.failed.values())
        bad.clear()
        cascade.forgive()
        assert run(cold, call)[0].tobytes() == wanted.tobytes(), "the layer is as good as before"


def test_heat_of_one_run_warms_the_next() -> None:
    model = Model.make(SPEC)
    rng = np.random.default_rng(9)
    with model.cold(8) as (cold, _):
        for expert in (6, 6, 6, 1, 1, 4):
            x, ids, weights = random_call(rng, 1, SPEC, DType.F32)
            ids[:] = [[expert, -1, -1]]
            run(cold, (x, ids, weights))
        heat = {3: tuple(cold.heat.tolist())}
    shares = rates_of(heat, 1)
    assert shares[ExpertKey(3, 6)] == 0.5
    assert sum(shares.values()) == pytest.approx(1)
    with model.cold(3, policy=POLICIES["heat"], rates=shares, window=1) as (_, cascade):
        cascade.warm()
        assert cascade.resident().keys() == {ExpertKey(3, 6), ExpertKey(3, 1)}


def test_all_experts_gone() -> None:
    model = Model.make(SPEC)
    model.below.fails = lambda key: True
    call = random_call(np.random.default_rng(3), 4, SPEC, DType.F32)
    call[1][0] = -1  # a padding token needs nobody
    with model.cold(2) as (cold, _):
        got, outcome = run(cold, call)
    assert not got[0].any()
    assert np.isnan(got[1:]).all()
    assert [*outcome.poisoned] == [1, 2, 3]


def test_calls_without_any_expert() -> None:
    model = Model.make(SPEC)
    call = random_call(np.random.default_rng(4), 3, SPEC, DType.F32)
    call[1][:] = -7
    with model.cold(2) as (cold, cascade):
        got, _ = run(cold, call)
        assert not got.any()
        assert cascade.stats().reads == 0
        assert cold.heat.sum() == 0


def test_ids_out_of_range_are_refused_before_anything_is_read() -> None:
    model = Model.make(SPEC)
    call = random_call(np.random.default_rng(5), 3, SPEC, DType.F32)
    call[1][2, 1] = 8
    with model.cold(2) as (cold, cascade):
        with pytest.raises(KernelError, match=r"expert id 8 of token 2, slot 1 is outside 0\.\.7"):
            run(cold, call)
        assert cascade.stats().reads == 0


def test_a_cascade_of_another_model_is_refused() -> None:
    model = Model.make(SPEC)
    more = LayerSpec(hidden=96, intermediate=64, experts=9, top_k=3, act=ActFormat.MXINT8)
    wide = LayerSpec(hidden=1024, intermediate=64, experts=8, top_k=3, act=ActFormat.MXINT8)
    with Cascade(model.below, model.record) as cascade:
        for spec, message in ((more, "1 experts of layer 3 are nowhere"), (wide, "bytes, not")):
            with pytest.raises(TierError, match=message):
                plan(3, spec, 4, model.pool, cascade=cascade, scratch=RowScratch())


def test_what_is_wanted_most_is_read_first_and_prefill_is_told() -> None:
    model = Model.make(SPEC)
    x = random_x(np.random.default_rng(6), 4, 96, DType.F32)
    ids = np.array([[1, 4, 4], [4, 6, -1], [6, 7, -1], [4, 0, -1]], np.int32)
    weights = np.ones((4, 3), np.float32)
    seen: list[tuple[int, int, Any]] = []

    def watch(layer: int, ids: NDArray[np.int32], prefill: Any) -> None:
        seen.append((layer, ids.size, prefill))

    with model.cold(8, watch=watch) as (cold, _):
        run(cold, (x, ids, weights), prefill=np.array([True, False, True, True]))
        assert [key.expert for key, _ in model.below.log] == [4, 6, 0, 1, 7]
        assert cold.heat.tolist() == [1, 1, 0, 0, 4, 0, 2, 1]
    assert seen[0][:2] == (3, 12)
    asked = plan_asks(model, ids, np.array([True, False, True, True]))
    assert {key.expert for key in asked} == {0, 1, 7}, "a decoding token wants 4 and 6"


def plan_asks(model: Model, ids: NDArray[np.int32], prefill: NDArray[np.bool_]) -> Any:
    asked: list[Any] = []
    with model.cold(8) as (cold, cascade):
        want = cascade.want

        def spy(keys: Any, swept: Any) -> Any:
            asked.append(swept)
            return want(keys, swept)

        cascade.want = spy  # type: ignore[method-assign]
        x = random_x(np.random.default_rng(6), len(ids), 96, DType.F32)
        run(cold, (x, ids, np.ones(ids.shape, np.float32)), prefill=prefill)
    return asked[0]


def test_a_step_that_fails_leaves_nothing_leased_or_bound() -> None:
    """Whatever ends a call, the experts of its group are let go."""
    model = Model.make(SPEC)
    call = random_call(np.random.default_rng(7), 5, SPEC, DType.F32)
    with model.cold(2) as (cold, cascade):
        wanted, _ = run(model.judge, call)
        layer = cold._layer

        def broken(**_: Any) -> None:
            raise KernelError("on purpose", hint="")

        cold._layer = _Broken(layer, broken)  # type: ignore[assignment]
        with pytest.raises(KernelError, match="on purpose"):
            run(cold, call)
        assert cascade.stats().leases == 0
        cold._layer = layer
        assert run(cold, call)[0].tobytes() == wanted.tobytes()


class _Broken:
    def __init__(self, inner: Any, call: Any) -> None:
        self._inner, self.run_at, self.run_rows_at = inner, call, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_over_a_pack_on_disk(tmp_path: Path) -> None:
    """From a checkpoint's pack through the NVMe tier: the bits of the experts in memory."""
    from moet.checkpoint import open_checkpoint
    from moet.hybrid.load import load, record_layout, tier_bytes
    from moet.pack.reader import open_pack
    from moet.pack.writer import write_pack
    from moet.testing.toy import write_toy_checkpoint
    from moet.tiers.nvme import NvmeTier
    from moet.tiers.pack_source import PackSource

    write_toy_checkpoint(tmp_path / "model", hidden=96, intermediate=128, experts=6, top_k=3)
    checkpoint = open_checkpoint(tmp_path / "model")
    report = write_pack(checkpoint, [tmp_path / "packs"])
    model = checkpoint.geometry
    spec = LayerSpec(
        hidden=model.hidden,
        intermediate=record_layout(model).intermediate,
        experts=model.experts,
        top_k=model.top_k,
        act=model.act,
        gate=model.gate,
    )
    tier = RamTier(tier_bytes(model), populate=False)
    load(checkpoint, tier)
    pool, rng = Pool(2), np.random.default_rng(8)
    pack = open_pack(report.folder, checkpoint)
    size = spec.layout.record_bytes
    with pack.hold(), NvmeTier(PackSource(pack)) as below, Cascade(below, 3 * size) as cascade:
        scratch = RowScratch()
        for layer in (0, 1, 0, 1):
            judge = experts.plan(spec, 16, pool)
            judge.bind(tier.acquire(ExpertKey(layer, e)) for e in range(spec.experts))
            cold = plan(layer, spec, 16, pool, cascade=cascade, scratch=scratch)
            call = random_call(rng, 9, spec, DType.BF16)
            assert run(cold, call)[0].tobytes() == run(judge, call)[0].tobytes()
            judge.close()
        assert below.stats().verified == cascade.stats().reads > 0
    assert np.isfinite(widened(run(judge_of(tier, spec, pool), call)[0])).all()


def judge_of(tier: RamTier, spec: LayerSpec, pool: Pool) -> experts.Experts:
    judge = experts.plan(spec, 16, pool)
    judge.bind(tier.acquire(ExpertKey(0, e)) for e in range(spec.experts))
    return judge
