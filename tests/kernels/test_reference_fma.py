"""The emulated binary32 fma, against rational arithmetic and against C's fmaf; the stores."""

from __future__ import annotations

import itertools
import struct

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moet.base.errors import KernelError
from moet.kernels import rounding
from moet.kernels.reference import fma32, round_output
from moet.kernels.spec import DType
from moet.testing.exact import differing, fma_libm, fma_rational

ANY = st.floats(width=32)
SPECIAL_BITS = [
    0,
    1,
    2,
    0x7FFFFF,
    0x800000,
    0x800001,
    0x1000000,
    0x3F7FFFFF,
    0x3F800000,
    0x3F800001,
]
SPECIAL_BITS += [0x33800000, 0x4B000000, 0x4B7FFFFF, 0x7F7FFFFF, 0x7F000000, 0x7F800000, 0x7FC00000]


def floats(bits: object) -> np.ndarray:
    return np.asarray(bits, np.uint32).view(np.float32)


def random_floats(rng: np.random.Generator, n: int) -> np.ndarray:
    return floats(rng.integers(0, 1 << 32, n, dtype=np.uint64).astype(np.uint32))


def check_against_libm(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    assert differing(fma32(a, b, c), fma_libm(a, b, c)).size == 0


@given(ANY, ANY, ANY)
@example(2.0**-100, -(2.0**-60), 0.0)  # underflows to -0
@example(-0.0, 1.0, -0.0)
@example(1.0, 1.0, -1.0)
@example(2.0**127, 2.0, 0.0)
def test_equals_rational_arithmetic(a: float, b: float, c: float) -> None:
    got = fma32(*(np.array([v], np.float32) for v in (a, b, c)))
    want = np.array([fma_rational(a, b, c)], np.float32)
    assert differing(got, want).size == 0


def test_rational_and_libm_agree_on_special_values() -> None:
    specials = floats(SPECIAL_BITS)
    specials = np.concatenate((specials, -specials))
    a, b, c = np.array(list(itertools.product(specials, repeat=3)), np.float32).T
    want = np.array([fma_rational(*map(float, t)) for t in zip(a, b, c, strict=True)], np.float32)
    assert differing(fma_libm(a, b, c), want).size == 0
    assert differing(fma32(a, b, c), want).size == 0


def test_random_bit_patterns() -> None:
    rng = np.random.default_rng(11)
    check_against_libm(*(random_floats(rng, 1_000_000) for _ in range(3)))


def test_addend_near_the_product() -> None:
    """Cancellation: c is minus the rounded product, a few units off, so the tail is the result."""
    rng = np.random.default_rng(12)
    a, b = (np.ldexp(rng.standard_normal(400_000), e).astype(np.float32) for e in (20, -31))
    c = floats((-(a * b)).view(np.uint32) + rng.integers(-2, 3, a.size).astype(np.uint32))
    check_against_libm(a, b, c)


def test_sums_just_beside_the_middle_of_two_numbers() -> None:
    """Where rounding twice goes wrong: c an fp32 number, a * b half a unit of it, and a hair."""
    rng = np.random.default_rng(13)
    n = 400_000
    c = floats((rng.integers(30, 220, n) << 23 | rng.integers(0, 1 << 23, n)).astype(np.uint32))
    half = np.spacing(c).astype(np.float64) / 2
    a = (1 + rng.integers(-3, 4, n) * 2.0**-23).astype(np.float32)
    b = (half * (1 + rng.integers(-3, 4, n) * 2.0**-23) * rng.choice([-1, 1], n)).astype(np.float32)
    doubly = (a.astype(np.float64) * b + c).astype(np.float32)
    check_against_libm(a, b, c)
    assert differing(doubly, fma32(a, b, c)).size > 1000  # the hazard is real


def test_subnormal_results() -> None:
    rng = np.random.default_rng(14)
    n = 400_000
    a = np.ldexp(rng.standard_normal(n), rng.integers(-80, -60, n)).astype(np.float32)
    b = np.ldexp(rng.standard_normal(n), rng.integers(-75, -60, n)).astype(np.float32)
    c = floats(rng.integers(0, 0x01800000, n).astype(np.uint32)) * rng.choice([-1, 0, 1], n)
    check_against_libm(a, b, c.astype(np.float32))


def test_around_overflow() -> None:
    rng = np.random.default_rng(15)
    a = floats(0x7F000000 + rng.integers(0, 1 << 23, 200_000).astype(np.uint32))
    b = floats(0x3F800000 + rng.integers(-8, 1 << 23, 200_000).astype(np.uint32))
    c = floats(rng.integers(0x72000000, 0x74000000, 200_000).astype(np.uint32))
    check_against_libm(a, b, c * rng.choice([-1, 1], c.size).astype(np.float32))


def test_broadcasts() -> None:
    a, b = np.float32([[1], [2]]), np.float32([3, 4, 5])
    assert fma32(a, b, np.float32(10)).tolist() == [[13, 14, 15], [16, 18, 20]]


def nearest_bf16(x: float) -> int:
    """Bits of the nearest bf16 to a positive finite x by search over the two candidates."""
    low = struct.unpack("<I", struct.pack("<f", x))[0] >> 16
    values = [struct.unpack("<f", struct.pack("<I", c << 16))[0] for c in (low, low + 1)]
    values = [v if v < float("inf") else 2.0**128 for v in values]  # as if the range went on
    return low + min((0, 1), key=lambda i: (abs(values[i] - x), (low + i) % 2))


def test_bf16_store_is_the_nearest_ties_to_even() -> None:
    high = np.concatenate((np.arange(0, 0x7F80, 41), [0, 1, 0x7F, 0x80, 0x7F7E, 0x7F7F]))
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = floats((high[:, None] << 16 | low).astype(np.uint32).reshape(-1))
    want = np.array([nearest_bf16(float(v)) for v in x])
    assert (round_output(x, DType.BF16) == want).all()
    assert (round_output(-x, DType.BF16) == want | 0x8000).all()
    assert want.max() == 0x7F80  # overflow to infinity is among them
    assert (rounding.widen_bf16(want.astype(np.uint16)).view(np.uint32) == want << 16).all()


HALF_CASES = [
    (65504.0, 0x7BFF),
    (65519.996, 0x7BFF),
    (65520.0, 0x7C00),
    (np.inf, 0x7C00),
    (2.0**-14, 0x0400),
    (2.0**-24, 0x0001),
    (2.0**-25, 0x0000),
    (1.5 * 2.0**-24, 0x0002),
    (2.5 * 2.0**-24, 0x0002),
    (2.0**-25 * (1 + 2.0**-20), 0x0001),
    (2.0**-149, 0x0000),
    (1 + 2.0**-11, 0x3C00),
    (1 + 3 * 2.0**-11, 0x3C02),
]


def test_fp16_store_overflows_to_infinity_and_keeps_subnormals() -> None:
    x = np.array([v for v, _ in HALF_CASES], np.float32)
    bits = np.array([b for _, b in HALF_CASES])
    assert (round_output(x, DType.F16) == bits).all()
    assert (round_output(-x, DType.F16) == bits | 0x8000).all()


@pytest.mark.parametrize(
    ("dtype", "bits"), [(DType.F32, 0x7FFFFFFF), (DType.BF16, 0x7FFF), (DType.F16, 0x7FFF)]
)
def test_every_nan_is_stored_as_the_canonical_one(dtype: DType, bits: int) -> None:
    nan = floats([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF])
    assert (round_output(nan, dtype) == bits).all()


def test_fp32_store_changes_nothing_but_nan() -> None:
    x = random_floats(np.random.default_rng(16), 100_000)
    x = x[~np.isnan(x)]
    assert (round_output(x, DType.F32) == x.view(np.uint32)).all()


def test_a_thread_that_flushes_subnormals_is_refused() -> None:
    torch = pytest.importorskip("torch", reason="needs torch, to switch FTZ and DAZ on")
    rounding.check_environment()
    assert torch.set_flush_denormal(True)
    try:
        with pytest.raises(KernelError, match="flushes subnormal"):
            rounding.check_environment()
    finally:
        torch.set_flush_denormal(False)
    rounding.check_environment()
