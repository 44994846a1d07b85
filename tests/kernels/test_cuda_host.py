"""The CUDA sources themselves, run on the CPU block by block, against the reference: same bits.

What this cannot show is left to `moet verify bits --gpu` on a card: the compiler's code, races
between warps that only hardware has, and the order of memory operations.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.kernels.cuda_host.emulator import CARD, HostGpu, HostLauncher, build_library

from moet.base.errors import KernelError
from moet.bench import moe_gpu
from moet.formats.gate import GateKind
from moet.formats.mxint import ActFormat
from moet.kernels import reference
from moet.kernels.cpu import Pool, default_cpus, isa_available
from moet.kernels.cuda import params as cuda_params
from moet.kernels.cuda.layer import (
    ELSEWHERE,
    FOREIGN,
    CudaLayer,
    Elsewhere,
    Step,
    workspace_of,
)
from moet.kernels.cuda.plan import Tuning, plan_layer
from moet.kernels.rounding import round_output
from moet.kernels.spec import DType, LayerSpec
from moet.verify.cases import (
    PLAIN_SCALES,
    WILD_SCALES,
    LayerCase,
    aligned_bytes,
    random_routing,
    random_x,
    widened,
)
from moet.verify.gpu import ExamCase, examine

Array = NDArray[Any]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_library(tmp_path_factory.mktemp("cuda_host"))


class Rig:
    """A case planned for the CPU stand-in, its workspace full of NaN."""

    def __init__(
        self, library: ctypes.CDLL, case: LayerCase, max_tokens: int, seed: int, **tuning: int
    ) -> None:
        rng = np.random.default_rng(seed)
        choice = Tuning(
            deepest=int(rng.integers(2, 4)), sum_tasks=int(rng.integers(1, 3)), **tuning
        )
        self.case = case
        self.table = case.records.ctypes.data + np.arange(
            case.spec.experts, dtype=np.uint64
        ) * np.uint64(case.spec.layout.record_bytes)
        plan = plan_layer(case.spec, CARD, max_tokens, choice)
        self.workspace = aligned_bytes(workspace_of(case.spec, plan).nbytes)
        self.workspace[:] = 0xFF
        self.launcher = HostLauncher(library, bool(rng.integers(2)), bool(rng.integers(2)))
        self.layer = CudaLayer(
            case.spec, CARD, self.launcher, table=self.table.ctypes.data,
            workspace=self.workspace.ctypes.data, max_tokens=max_tokens, tuning=choice,
        )  # fmt: skip
        self.status[0] = 0

    @property
    def status(self) -> Array:
        at = self.layer.parts.status
        return self.workspace[at : at + 4].view(np.uint32)

    def rows(self, routings: int) -> Array:
        at, hidden = self.layer.parts.rows, self.case.spec.hidden
        return self.workspace[at : at + 4 * routings * hidden].view(np.float32).reshape(-1, hidden)

    def step(self, x: Array, ids: Array, weights: Array, out: Array, out_type: DType) -> Step:
        types = {"float32": DType.F32, "float16": DType.F16, "uint16": DType.BF16}
        return Step(
            x=x.ctypes.data,
            x_type=types[x.dtype.name],
            tokens=x.shape[0],
            ids=ids.ctypes.data,
            weights=weights.ctypes.data,
            out=out.ctypes.data,
            out_type=out_type,
            slots=ids.shape[1],
        )

    def run(self, x: Array, ids: Array, weights: Array, out_type: DType = DType.F32) -> Array:
        out = np.zeros(x.shape, np.uint32 if out_type is DType.F32 else np.uint16)
        self.layer.run(self.step(x, ids, weights, out, out_type))
        return out


def expected(case: LayerCase, x: Array, ids: Array, weights: Array, out_type: DType) -> Array:
    slots = ids.shape[1]
    spec = replace(case.spec, top_k=slots)
    out = reference.moe_layer(spec, widened(x), ids, weights, case.experts)
    return round_output(out, out_type)


SPECS = {
    "int8": LayerSpec(hidden=256, intermediate=96, experts=5, top_k=3, act=ActFormat.MXINT8),
    "int16": LayerSpec(hidden=96, intermediate=256, experts=5, top_k=2, act=ActFormat.MXINT16),
    "segments": LayerSpec(
        hidden=1120, intermediate=544, experts=3, top_k=2, act=ActFormat.MXINT8, limit=10.0,
        output_scale=1.5,
    ),
    "segments16": LayerSpec(
        hidden=544, intermediate=1056, experts=2, top_k=2, act=ActFormat.MXINT16, limit=0.5
    ),
    "gpt-oss": LayerSpec(
        hidden=352, intermediate=352, experts=4, top_k=4, act=ActFormat.MXINT16,
        gate=GateKind.GPT_OSS, limit=7.0, biased=True,
    ),
    "gelu": LayerSpec(
        hidden=32, intermediate=32, experts=700, top_k=2, act=ActFormat.MXINT8,
        gate=GateKind.GELU_TANH, biased=True,
    ),
}  # fmt: skip
TOKENS = {"segments": 3, "segments16": 2}


@pytest.mark.parametrize("scales", [PLAIN_SCALES, WILD_SCALES], ids=["plain", "wild"])
@pytest.mark.parametrize("name", SPECS)
def test_same_bits_as_the_reference(
    library: ctypes.CDLL, name: str, scales: tuple[int, int]
) -> None:
    rng = np.random.default_rng([ord(c) for c in name])
    spec, wild = SPECS[name], scales == WILD_SCALES
    case = LayerCase.random(rng, spec, scales)
    rig = Rig(library, case, max_tokens=24, seed=int(rng.integers(1 << 30)))
    for x_type, tokens in zip(DType, (1, TOKENS.get(name, 5), TOKENS.get(name, 19)), strict=True):
        x = random_x(rng, tokens, spec.hidden, x_type, wild)
        ids, weights = random_routing(rng, tokens, spec)
        out = rig.run(x, ids, weights, x_type)
        np.testing.assert_array_equal(out, expected(case, x, ids, weights, x_type))
    assert rig.status[0] == 0


@pytest.mark.parametrize("act", ActFormat)
def test_more_tokens_on_one_expert_than_an_mma_has_columns(
    library: ctypes.CDLL, act: ActFormat
) -> None:
    rng = np.random.default_rng(3)
    spec = LayerSpec(hidden=128, intermediate=64, experts=4, top_k=3, act=act)
    case = LayerCase.random(rng, spec)
    rig = Rig(library, case, max_tokens=30, seed=4, warps=1)
    for ids in (
        np.full((30, 3), 2, np.int32),
        rng.choice([1, 1, 1, 3, -1], (30, 3)).astype(np.int32),
        np.full((30, 3), -1, np.int32),
    ):
        x = random_x(rng, 30, spec.hidden, DType.BF16)
        weights = rng.standard_normal(ids.shape).astype(np.float32)
        out = rig.run(x, ids, weights, DType.BF16)
        np.testing.assert_array_equal(out, expected(case, x, ids, weights, DType.BF16))


def test_a_poisoned_token_is_nan_alone(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(5)
    spec = SPECS["int8"]
    rig = Rig(library, LayerCase.random(rng, spec), max_tokens=8, seed=6)
    x = random_x(rng, 4, spec.hidden, DType.F32)
    ids = np.tile(np.arange(3, dtype=np.int32), (4, 1))
    weights = np.ones((4, 3), np.float32)
    clean = rig.run(x, ids, weights).view(np.float32)
    x[2, 40] = np.inf
    out = rig.run(x, ids, weights).view(np.float32)
    assert np.isnan(out[2]).all()
    np.testing.assert_array_equal(np.delete(out, 2, 0), np.delete(clean, 2, 0))


def test_rows_from_elsewhere_join_in_the_combine(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(7)
    spec = SPECS["int16"]
    case = LayerCase.random(rng, spec)
    x = random_x(rng, 6, spec.hidden, DType.BF16)
    ids, weights = random_routing(rng, 6, spec)
    whole = Rig(library, case, max_tokens=6, seed=8)
    want = whole.run(x, ids, weights)
    rows = whole.rows(ids.size).copy()

    split = Rig(library, case, max_tokens=6, seed=9)
    split.table[[1, 3]] = ELSEWHERE
    out = np.zeros_like(want)
    step = replace(split.step(x, ids, weights, out, DType.F32), elsewhere=Elsewhere.IN_ROWS)
    split.layer.run_experts(step)
    theirs = np.flatnonzero(np.isin(ids.ravel(), (1, 3)))
    assert np.isnan(split.rows(ids.size)[theirs]).all(), "rows of others were written"
    split.rows(ids.size)[theirs] = rows[theirs]
    split.layer.run_combine(step)
    np.testing.assert_array_equal(out, want)
    assert split.status[0] == 0


def test_a_slot_that_nobody_can_compute_is_nan_and_counted(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(10)
    spec = SPECS["int8"]
    rig = Rig(library, LayerCase.random(rng, spec), max_tokens=4, seed=11)
    rig.table[4] = ELSEWHERE
    x = random_x(rng, 3, spec.hidden, DType.F32)
    ids = np.array([[0, 4, 1], [0, 1, spec.experts], [2, 1, 0]], np.int32)
    out = rig.run(x, ids, np.ones(ids.shape, np.float32)).view(np.float32)
    assert np.isnan(out[:2]).all()
    assert not np.isnan(out[2]).any()
    assert rig.status[0] == 2


def test_slots_of_other_ranks_are_skipped(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(12)
    spec = SPECS["int8"]
    case = LayerCase.random(rng, spec)
    rig = Rig(library, case, max_tokens=4, seed=13)
    rig.table[[0, 2]] = FOREIGN
    x = random_x(rng, 4, spec.hidden, DType.F16)
    ids, weights = random_routing(rng, 4, spec)
    owned = {e: w for e, w in case.experts.items() if e not in (0, 2)}
    want = reference.moe_layer(spec, widened(x), ids, weights, owned)
    np.testing.assert_array_equal(rig.run(x, ids, weights), round_output(want, DType.F32))


def test_fewer_slots_than_top_k(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(14)
    case = LayerCase.random(rng, SPECS["int8"])
    rig = Rig(library, case, max_tokens=4, seed=15)
    x = random_x(rng, 4, case.spec.hidden, DType.F32)
    ids, weights = random_routing(rng, 4, replace(case.spec, top_k=2))
    out = rig.run(x, ids, weights)
    np.testing.assert_array_equal(out, expected(case, x, ids, weights, DType.F32))


def test_a_step_is_four_launches(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(16)
    rig = Rig(library, LayerCase.random(rng, SPECS["int8"]), max_tokens=2, seed=17)
    x = random_x(rng, 1, rig.case.spec.hidden, DType.F32)
    rig.run(x, np.zeros((1, 3), np.int32), np.ones((1, 3), np.float32))
    assert rig.launcher.launched == [
        "moet_quantise", "moet_gate_up_8", "moet_down_8", "moet_combine",
    ]  # fmt: skip


EXAM = (
    ExamCase(name="plain", spec=SPECS["int8"]),
    ExamCase(
        name="wild",
        spec=LayerSpec(hidden=96, intermediate=64, experts=4, top_k=1, act=ActFormat.MXINT16),
        wild=True,
        tuning=Tuning(warps=1, deepest=6, overlap=False),
    ),
)


@pytest.mark.parametrize("broken", [False, True])
def test_the_exam_of_a_card_sees_every_byte(library: ctypes.CDLL, broken: bool) -> None:
    card = HostGpu(library)
    card.broken = broken
    seen: list[str] = []
    report = examine(
        card,
        Pool(1, default_cpus()),
        outputs=4000,
        cases=EXAM,
        progress=lambda c: seen.append(c.name),
    )
    assert report.outputs >= 4000
    assert report.passed is not broken
    assert seen == ["plain", "wild"]
    assert report.isa in isa_available()
    assert card.held == {}
    if broken:
        assert all(c.differing == 2 * c.calls for c in report.cases)
        assert "the CPU has" in report.cases[0].example


def test_the_bench_of_the_kernels_runs_whole_steps_and_each_launch(library: ctypes.CDLL) -> None:
    card = HostGpu(library)
    spec = LayerSpec(hidden=64, intermediate=32, experts=12, top_k=2, act=ActFormat.MXINT8)
    rig = moe_gpu.Rig(card, spec, most_tokens=4)  # type: ignore[arg-type]
    timings = rig.measure(rig.layer(), 2, launches=True, repeats=1)
    assert [t.what for t in timings] == ["step", "quantise", "gate_up", "down", "combine"]
    assert all(t.microseconds > 0 and 2 <= t.experts <= 4 for t in timings)
    step = timings[0]
    assert step.nbytes == step.experts * spec.layout.payload_bytes
    rig.close()
    assert card.held == {}


STRUCTURES = [
    "QuantiseParams", "StageParams", "CombineParams", "PostParams", "WaitParams", "MailState",
]  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURES)
def test_parameters_have_the_size_that_the_device_code_gives_them(
    library: ctypes.CDLL, name: str
) -> None:
    assert library.moet_host_size(name.encode()) == ctypes.sizeof(getattr(cuda_params, name))


@pytest.mark.parametrize(
    ("change", "match"),
    [({"tokens": 9}, "9 tokens"), ({"slots": 4}, "4 slots"), ({"x": 8}, "aligned")],
)
def test_steps_that_do_not_fit_are_refused(
    library: ctypes.CDLL, change: dict[str, int], match: str
) -> None:
    rng = np.random.default_rng(18)
    rig = Rig(library, LayerCase.random(rng, SPECS["int8"]), max_tokens=8, seed=19)
    x = np.zeros((1, rig.case.spec.hidden), np.float32)
    step = rig.step(x, np.zeros((1, 3), np.int32), np.ones((1, 3), np.float32), x, DType.F32)
    with pytest.raises(KernelError, match=match):
        rig.layer.run(replace(step, **change))
    assert rig.launcher.launched == []
