"""Section 5: E and the gates: accuracy, limits, and what NaN, infinity and zero do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from moet.formats.gate import GateKind
from moet.kernels import reference
from moet.testing.exact import differing, fma_rational

INF, NAN = np.float32(np.inf), np.float32(np.nan)
KINDS = pytest.mark.parametrize("kind", list(GateKind), ids=lambda k: k.name)
MAX_BITS_87 = int(np.float32(87).view(np.uint32))


def floats(bits: object) -> np.ndarray:
    return np.asarray(bits).astype(np.uint32).view(np.float32)


def both_signs(magnitude_bits: np.ndarray) -> np.ndarray:
    x = floats(magnitude_bits)
    return np.concatenate((x, -x))


def dense_sample(limit: float, step: int) -> np.ndarray:
    """Every step-th fp32 of magnitude up to `limit`, the limit itself, both signs."""
    top = int(np.float32(limit).view(np.uint32))
    return both_signs(np.append(np.arange(0, top, step), top))


def ulps(got: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Error of fp32 `got` in units of the last place of the true fp64 value."""
    unit = np.ldexp(1.0, np.maximum(np.frexp(true)[1] - 1, -126) - 23)
    return np.abs(got.astype(np.float64) - true) / unit


# ---- E


def check_exp(x: np.ndarray) -> float:
    got = reference.exp(x)
    assert (got >= np.finfo(np.float32).smallest_normal).all()
    assert np.isfinite(got).all()
    return float(ulps(got, np.exp(x.astype(np.float64))).max())


def test_exp_is_within_nine_tenths_of_an_ulp_on_a_dense_sample() -> None:
    worst = check_exp(dense_sample(87, 997))
    assert 0.85 < worst <= 0.9


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_exp_is_within_nine_tenths_of_an_ulp_everywhere() -> None:
    step = 1 << 14
    worst = 0.0
    for start in range(0, MAX_BITS_87 + 1, step):
        bits = np.arange(start, min(start + step, MAX_BITS_87 + 1))
        worst = max(worst, check_exp(both_signs(bits)))
    assert worst <= 0.9


def exp_by_hand(x: float) -> float:
    """E with rational fma, one number."""
    c = [float.fromhex(h) for h in ("0x1.12397ep-7", "0x1.5558acp-5", "0x1.555492p-3")]
    c += [float.fromhex("0x1.fffffcp-2"), 1.0, 1.0]
    x = max(min(x, 87.0), -87.0)
    z = fma_rational(x, float.fromhex("0x1.715476p+0"), 12582912.0)
    n = z - 12582912.0
    r = fma_rational(n, -float.fromhex("0x1.62e43p-1"), x)
    r = fma_rational(n, float.fromhex("0x1.05c61p-29"), r)
    p = float.fromhex("0x1.6a515cp-10")
    for coefficient in c:
        p = fma_rational(p, r, coefficient)
    return p * 2.0**n  # exact, as the result is normal


def test_exp_equals_the_page_by_hand() -> None:
    rng = np.random.default_rng(1)
    x = np.concatenate((rng.uniform(-90, 90, 600), rng.standard_normal(200) * 1e-3))
    x = np.append(x, [0.0, -0.0, 87, -87, 88, -88, 1e30, -1e30, np.log(2) / 2, 2.0**-149])
    x = x.astype(np.float32)
    want = np.array([exp_by_hand(float(v)) for v in x], np.float32)
    assert differing(reference.exp(x), want).size == 0


def test_exp_of_special_values() -> None:
    got = reference.exp(np.float32([0.0, -0.0, INF, -INF, 1e9, -1e9]))
    top, bottom = reference.exp(np.float32([87, -87]))
    assert got.tolist() == [1, 1, top, bottom, top, bottom]


# ---- the gates


def y_true(kind: GateKind, x: np.ndarray) -> np.ndarray:
    if kind is GateKind.GELU_TANH:
        z = 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    else:
        z = x * (1.702 if kind is GateKind.GPT_OSS else 1)
    return x / (1 + np.exp(-z))


Y_BOUNDS = [
    (GateKind.SILU, 87, 1.4e-6),
    (GateKind.GPT_OSS, 51, 8e-7),
    (GateKind.GELU_TANH, 9, 6e-7),
]


@pytest.mark.parametrize(("kind", "domain", "bound"), Y_BOUNDS)
def test_y_is_close_to_the_real_function(kind: GateKind, domain: float, bound: float) -> None:
    x = dense_sample(domain, 4999)
    error = np.abs(reference.gate_value(kind, x) - y_true(kind, x.astype(np.float64)))
    assert error[x < 8].max() <= bound
    assert (error <= np.maximum(np.abs(x) * 2.0**-22, bound)).all()


def test_silu_is_within_two_and_a_half_ulp() -> None:
    x = dense_sample(87, 1999)
    x = x[np.abs(x) >= np.finfo(np.float32).smallest_normal * 4]
    y = y_true(GateKind.SILU, x.astype(np.float64))
    assert ulps(reference.gate_value(GateKind.SILU, x), y).max() <= 2.5


@KINDS
def test_y_of_special_values(kind: GateKind) -> None:
    y = reference.gate_value(kind, np.float32([0.0, -0.0, INF, NAN, -NAN]))
    assert y[:3].tolist() == [0, 0, np.inf]
    assert np.signbit(y[:2]).tolist() == [False, True]
    assert np.isnan(y[3:]).all()


@KINDS
def test_y_of_any_nan_is_nan(kind: GateKind) -> None:
    rng = np.random.default_rng(2)
    payloads = 0x7F800001 + rng.integers(0, 0x7FFFFF, 5000)
    assert np.isnan(reference.gate_value(kind, both_signs(payloads))).all()


@KINDS
def test_the_lower_tail_is_flat_and_tiny(kind: GateKind) -> None:
    floor = {GateKind.SILU: -87, GateKind.GPT_OSS: -51, GateKind.GELU_TANH: -9}[kind]
    below = reference.gate_value(kind, np.float32([floor, floor - 1, -1e30, -INF]))
    assert (below == below[0]).all()
    assert -1e-14 < below[0] < 0


@KINDS
def test_no_finite_input_gives_nan(kind: GateKind) -> None:
    x = both_signs(np.arange(0, 0x7F800000, 9973))
    assert not np.isnan(reference.gate_value(kind, x)).any()


# ---- limits and h

H_CASES: list[tuple[GateKind, float | None, float, float, Callable[[float], float]]] = [
    (GateKind.SILU, None, 20.0, 30.0, lambda y: y * 30),
    (GateKind.SILU, 10.0, 20.0, 30.0, lambda y: y * 10),
    (GateKind.SILU, 10.0, 10.0, -30.0, lambda y: y * -10),
    (GateKind.SILU, 10.0, -20.0, 10.5, lambda y: y * 10),
    (GateKind.GPT_OSS, 7.0, 9.0, 9.0, lambda y: y * 8),
    (GateKind.GPT_OSS, 7.0, 9.0, -9.0, lambda y: y * -6),
    (GateKind.GPT_OSS, 7.0, -9.0, 0.5, lambda y: y * 1.5),
    (GateKind.GELU_TANH, None, 3.0, -2.0, lambda y: y * -2),
]


@pytest.mark.parametrize(("kind", "limit", "g", "u", "h_of_y"), H_CASES)
def test_limits(
    kind: GateKind, limit: float | None, g: float, u: float, h_of_y: Callable[[float], float]
) -> None:
    clamped = g if limit is None else min(g, limit)  # gate has no lower limit
    y = float(reference.gate_value(kind, np.float32([clamped]))[0])
    h = reference.gates(kind, limit, np.float32([g]), np.float32([u]))
    assert h[0] == np.float32(h_of_y(y))


@KINDS
@pytest.mark.parametrize("limit", [None, 7.0])
def test_nan_passes_every_limit(kind: GateKind, limit: float | None) -> None:
    g, u = np.float32([NAN, 1, NAN]), np.float32([1, NAN, NAN])
    assert np.isnan(reference.gates(kind, limit, g, u)).all()


@KINDS
def test_infinities_are_cut_by_a_limit_and_kept_without(kind: GateKind) -> None:
    g, u = np.float32([INF, INF, 1]), np.float32([2, -INF, INF])
    assert np.isfinite(reference.gates(kind, 7.0, g, u)).all()
    assert reference.gates(kind, None, g, u).tolist() == [np.inf, -np.inf, np.inf]


def test_h_is_rounded_after_each_step_in_gpt_oss() -> None:
    u = np.float32([2.0**-30, 1 + 2.0**-23, -1])
    y = reference.gate_value(GateKind.GPT_OSS, np.full(3, 3, np.float32))
    h = reference.gates(GateKind.GPT_OSS, 7.0, np.full(3, 3, np.float32), u)
    assert h.tolist() == [y[0], np.float32(2) * y[1], 0]


def gate_by_hand(kind: GateKind, g: float) -> float:
    """y of one number in Python: every step a double that is then rounded to fp32 once."""
    a = max(g, {GateKind.SILU: -87.0, GateKind.GPT_OSS: -51.0, GateKind.GELU_TANH: -9.0}[kind])
    z = a
    if kind is GateKind.GPT_OSS:
        z = float(np.float32(float.fromhex("0x1.b3b646p+0") * a))
    if kind is GateKind.GELU_TANH:
        square = float(np.float32(a * a))
        cubic, linear = float.fromhex("0x1.2444f2p-4"), float.fromhex("0x1.988454p+0")
        z = float(np.float32(fma_rational(square, cubic, linear) * a))
    below = float(np.float32(1.0 + exp_by_hand(-z)))
    return float(np.float32(a / below))  # fp64 division, then fp32: right, as 53 >= 2 * 24 + 2


@KINDS
def test_y_equals_the_page_by_hand(kind: GateKind) -> None:
    rng = np.random.default_rng(3)
    g = np.concatenate((rng.standard_normal(300) * 3, rng.uniform(-60, 60, 200)))
    g = g.astype(np.float32)
    want = np.array([gate_by_hand(kind, float(v)) for v in g], np.float32)
    assert differing(reference.gate_value(kind, g), want).size == 0
