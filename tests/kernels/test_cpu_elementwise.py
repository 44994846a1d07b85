"""exp, gates, rows and combine of every instruction set against the reference, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moet import _core
from moet.formats.gate import GateKind
from moet.kernels import reference
from moet.kernels.cpu import isa_available
from moet.kernels.rounding import round_output
from moet.kernels.spec import DType
from moet.testing.exact import differing

Array = NDArray[Any]
F32 = NDArray[np.float32]
ISAS = isa_available()
EACH_ISA = pytest.mark.parametrize("isa", ISAS)
GUARD = np.float32(3.0)

ALL_FLOATS = st.floats(width=32)
MODEL_LIKE = st.floats(-30, 30, width=32)


def floats(bits: object) -> F32:
    return np.asarray(bits, np.uint32).view(np.float32)


def random_floats(rng: np.random.Generator, n: int, *, nan: bool = True) -> F32:
    """Uniform over all bit patterns."""
    x = floats(rng.integers(0, 1 << 32, n, dtype=np.uint64).astype(np.uint32))
    return x if nan else np.where(np.isnan(x), np.float32(1), x)


MAGNITUDES = [0, 1, 0x7FFFFF, 0x800000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x7F7FFFFF, 0x7F800000]
NANS = floats([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF])
LIMITS = np.array([0.5, 7, 9, 10, 51, 86.5, 87, 88, 89, 104], np.float32)
AROUND = np.concatenate([LIMITS, np.nextafter(LIMITS, 0), np.nextafter(LIMITS, np.float32(1e9))])
SPECIALS = np.concatenate((floats(MAGNITUDES), AROUND))
SPECIALS = np.concatenate((SPECIALS, -SPECIALS))


def same(got: Array, want: Array) -> bool:
    return got.shape == want.shape and differing(got, want).size == 0


def guarded(n: int) -> F32:
    return np.full(n + 1, GUARD, np.float32)


def address(a: Array | None) -> int:
    return 0 if a is None else a.ctypes.data


# ---- exp


def exp(isa: str, x: F32) -> F32:
    y = guarded(len(x))
    _core.exp(isa, x.ctypes.data, len(x), y.ctypes.data)
    assert y[-1] == GUARD
    return y[:-1]


@EACH_ISA
def test_exp_of_special_values_and_all_over_the_range(isa: str) -> None:
    rng = np.random.default_rng(1)
    dense = rng.uniform(-90, 90, 200_000).astype(np.float32)
    for x in (SPECIALS, dense, random_floats(rng, 100_000, nan=False)):
        assert same(exp(isa, x), reference.exp(x))


# ---- gates

Law = tuple[GateKind, float | None]
"""A kind of gate and its limit."""


def gate(isa: str, law: Law, g: F32, u: F32, biases: tuple[F32, F32] | None) -> F32:
    h = guarded(len(g))
    gate_bias, up_bias = biases or (None, None)
    addresses = [address(a) for a in (g, u, gate_bias, up_bias)]
    _core.gate(isa, *law, *addresses, len(g), address(h))
    assert h[-1] == GUARD
    return h[:-1]


def check_gate(isa: str, law: Law, g: F32, u: F32, biases: tuple[F32, F32] | None) -> None:
    got = gate(isa, law, g, u, biases)
    if biases is not None:
        g = reference.finish_row(g, biases[0], rows_bf16=False)
        u = reference.finish_row(u, biases[1], rows_bf16=False)
    assert same(got, reference.gates(*law, g, u))


@EACH_ISA
@pytest.mark.parametrize("limit", [None, 0.5, 7.0, 10.0])
@pytest.mark.parametrize("kind", list(GateKind), ids=lambda k: k.name)
def test_gates(isa: str, kind: GateKind, limit: float | None) -> None:
    law = (kind, limit)
    rng = np.random.default_rng(2)
    values = np.concatenate((SPECIALS, NANS))
    g, u = (a.ravel().copy() for a in np.meshgrid(values, values))
    check_gate(isa, law, g, u, None)
    for n, spread in ((20_000, 3.0), (20_000, 60.0)):
        g, u = (spread * rng.standard_normal((2, n))).astype(np.float32)
        check_gate(isa, law, g, u, None)
        check_gate(isa, law, g, u, (u[::-1].copy(), g[::-1].copy()))
    g, u = random_floats(rng, 50_000), random_floats(rng, 50_000)
    check_gate(isa, law, g, u, None)


@settings(deadline=None, max_examples=100)
@given(
    pairs=st.lists(st.tuples(*[st.one_of(MODEL_LIKE, ALL_FLOATS)] * 4), min_size=1, max_size=70),
    law=st.tuples(st.sampled_from(GateKind), st.sampled_from([None, 7.0, 10.0])),
    biased=st.booleans(),
    isa=st.sampled_from(ISAS),
)
def test_gates_of_any_length(
    pairs: list[tuple[float, ...]], law: Law, biased: bool, isa: str
) -> None:
    g, u, g_bias, u_bias = (np.array(column, np.float32) for column in zip(*pairs, strict=True))
    check_gate(isa, law, g, u, (g_bias, u_bias) if biased else None)


@EACH_ISA
def test_one_bias_without_the_other(isa: str) -> None:
    g, u = np.random.default_rng(3).standard_normal((2, 37)).astype(np.float32)
    for gate_bias, up_bias in ((u, None), (None, g)):
        h = guarded(37)
        addresses = [address(a) for a in (g, u, gate_bias, up_bias)]
        _core.gate(isa, GateKind.SILU, None, *addresses, 37, address(h))
        want = reference.gates(
            GateKind.SILU,
            None,
            g if gate_bias is None else g + gate_bias,
            u if up_bias is None else u + up_bias,
        )
        assert same(h[:-1], want)


# ---- rows


def finish_row(isa: str, tot: F32, bias: F32 | None, bf16: bool) -> F32:
    row = np.append(tot, GUARD)
    _core.finish_row(isa, address(row), address(bias), len(tot), bf16)
    assert row[-1] == GUARD
    return row[:-1]


@EACH_ISA
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("biased", [False, True])
def test_rows(isa: str, bf16: bool, biased: bool) -> None:
    rng = np.random.default_rng(4)
    halves = np.arange(1 << 16, dtype=np.uint32) << 16 | rng.choice(
        [0x7FFF, 0x8000, 0x8001], 1 << 16
    )
    tot = np.concatenate((SPECIALS, NANS, floats(halves), random_floats(rng, 50_001)))
    bias = random_floats(rng, len(tot)) if biased else None
    got, want = finish_row(isa, tot, bias, bf16), reference.finish_row(tot, bias, bf16)
    assert same(got, want)
    if bf16:  # NaN too: stored, so canonical
        assert got.tobytes() == want.tobytes()


# ---- combine


def combine(
    isa: str, rows: list[F32 | None], weights: F32, *, scale: float | None, kind: DType, n: int
) -> Array:
    guard = 0x5A5A
    out = np.full(n + 1, guard, np.uint32 if kind is DType.F32 else np.uint16)
    addresses = [address(row) for row in rows]
    _core.combine(isa, addresses, weights.ctypes.data, n, scale, kind, out.ctypes.data)
    assert out[-1] == guard
    return out[:-1]


def check_combine(
    isa: str, rows: list[F32 | None], weights: F32, *, scale: float | None, kind: DType, n: int
) -> None:
    valid = np.array([[row is not None for row in rows]])
    stacked = np.stack([np.full(n, np.nan, np.float32) if row is None else row for row in rows])
    out = reference.combine(stacked[None], valid, weights[None], scale)
    want = round_output(out[0], kind)
    assert combine(isa, rows, weights, scale=scale, kind=kind, n=n).tobytes() == want.tobytes()


@EACH_ISA
@pytest.mark.parametrize("kind", list(DType), ids=lambda k: k.name)
def test_stores_round_to_nearest_even(isa: str, kind: DType) -> None:
    """Around every 16-bit float: itself, the middles, their neighbours; subnormals, overflow."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    centres = [patterns.view(np.float16).astype(np.float32)]
    centres.append((patterns.astype(np.uint32) << 16).view(np.float32))
    near = [0, 1, 2, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    x = np.concatenate([floats(c.view(np.uint32) + np.uint32(d)) for c in centres for d in near])
    x = np.concatenate((x, SPECIALS, NANS, random_floats(np.random.default_rng(5), 50_000)))
    check_combine(isa, [x], np.ones(1, np.float32), scale=None, kind=kind, n=len(x))


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 70),
    slots=st.integers(1, 17),
    kind=st.sampled_from(DType),
    scale=st.sampled_from([None, 1.5, 0.3, 1.0]),
    wild=st.booleans(),
    isa=st.sampled_from(ISAS),
)
def test_combine(
    *, seed: int, n: int, slots: int, kind: DType, scale: float | None, wild: bool, isa: str
) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.random(slots).astype(np.float32)
    rows: list[F32 | None] = [r.copy() for r in rng.standard_normal((slots, n)).astype(np.float32)]
    if wild:
        weights = rng.choice(np.concatenate((weights, SPECIALS)), slots).astype(np.float32)
        rows = [random_floats(rng, n) for _ in rows]
    rows = [None if rng.random() < 0.3 else row for row in rows]
    check_combine(isa, rows, weights, scale=scale, kind=kind, n=n)


@EACH_ISA
@pytest.mark.parametrize("kind", list(DType), ids=lambda k: k.name)
def test_nothing_but_skipped_slots_gives_zero(isa: str, kind: DType) -> None:
    weights = np.full(3, np.nan, np.float32)
    for scale in (None, 2.0):
        assert not combine(isa, [None] * 3, weights, scale=scale, kind=kind, n=21).any()


@EACH_ISA
def test_zero_and_duplicate_weights_are_multiplied(isa: str) -> None:
    row = np.array([np.inf, 1.0, -1.0, np.nan, -0.0], np.float32)
    weights = np.array([0, -0.0, 2], np.float32)
    check_combine(isa, [row, row, row], weights, scale=None, kind=DType.F32, n=5)
    got = combine(isa, [row], weights, scale=None, kind=DType.F32, n=5).view(np.float32)
    assert np.isnan(got[[0, 3]]).all()
    assert (got[[1, 2, 4]] == 0).all()
