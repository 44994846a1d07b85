"""The activation quantiser: every claim of docs/numerics.md, section 1."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moet.formats import mxint
from moet.formats.mxint import CEILING, POISON, ActFormat

BOTH = pytest.mark.parametrize("act", list(ActFormat), ids=lambda a: a.name)
EXPONENTS = np.arange(256, dtype=np.uint32) << np.uint32(23)
LIMIT = {ActFormat.MXINT8: 127 * 2.0**105, ActFormat.MXINT16: 32639 * 2.0**97}


def floats(bits: np.ndarray) -> np.ndarray:
    return np.asarray(bits, np.uint32).view(np.float32)


def edge_bits(act: ActFormat) -> np.ndarray:
    """All exponents x mantissas around every boundary of the rule, and random ones."""
    carry = 0x800000 - act.carry
    edges = [0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, carry - 1, carry, carry + 1, 0x7FFFFE, 0x7FFFFF]
    random = np.random.default_rng(1).integers(0, 1 << 23, 500)
    mantissas = np.concatenate((edges, random)).astype(np.uint32)
    return (EXPONENTS[:, None] | mantissas).reshape(-1)


def be_by_definition(amax: np.ndarray, act: ActFormat) -> np.ndarray:
    """Smallest power of two that makes amax fit q_max, by frexp in fp64, then floor and ceiling."""
    with np.errstate(invalid="ignore"):
        fraction, exponent = np.frexp(amax.astype(np.float64))  # fraction in [1/2, 1)
        exponent = exponent - act.q_max.bit_length()
        fits = np.ldexp(fraction, act.q_max.bit_length()) <= act.q_max
        be = np.maximum(exponent + ~fits + act.unit, act.floor)
    be = np.where(amax == 0, act.floor, be)
    return np.where(np.isfinite(amax) & (be <= CEILING), be, POISON)


def check_amax(bits: np.ndarray, act: ActFormat) -> None:
    """The rule for blocks of one element whose bits are given."""
    x = floats(bits)[:, None]
    be = mxint.block_exponents(x, act)
    assert (be == be_by_definition(np.abs(x[:, 0]), act)).all()


@BOTH
def test_constants_are_those_of_the_page(act: ActFormat) -> None:
    page = {8: (0x1FFFF, 133, 8, 127), 16: (0x101FF, 141, 16, 32639)}[act.value]
    assert (act.carry, act.unit, act.floor, act.q_max) == page
    assert CEILING == 238


@BOTH
def test_be_is_the_smallest_that_fits_on_all_exponents_and_edges(act: ActFormat) -> None:
    bits = edge_bits(act)
    check_amax(bits, act)
    check_amax(bits | np.uint32(0x80000000), act)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@BOTH
def test_be_is_the_smallest_that_fits_on_all_magnitudes(act: ActFormat) -> None:
    step = 1 << 20
    for start in range(0, 1 << 31, step):
        check_amax(np.arange(start, start + step, dtype=np.uint32), act)


@BOTH
def test_q_of_the_largest_magnitude_uses_the_range_and_never_passes_it(act: ActFormat) -> None:
    x = floats(edge_bits(act))
    x = x[np.isfinite(x)]
    both_signs = np.stack((x, -x))
    got = mxint.quantise(both_signs[..., None], act)
    q = got.q[..., 0].astype(np.int64)
    free = (got.be[..., 0] > act.floor) & (got.be[..., 0] != POISON)
    assert np.abs(q).max() == act.q_max
    assert np.abs(q)[free].min() >= act.q_max // 2
    assert (q[0] == -q[1]).all()


@BOTH
def test_elements_are_the_nearest_integers_ties_to_even(act: ActFormat) -> None:
    x = np.random.default_rng(2).standard_normal((4000, 32)).astype(np.float32)
    x *= 2.0 ** np.random.default_rng(3).integers(-60, 60, (4000, 1))
    x[::7, 5] = x[::7].max() * np.float32(2**-9)
    got = mxint.quantise(x, act)
    exact = np.ldexp(x.astype(np.float64)[:, None], act.unit - got.be[..., None].astype(int))
    assert (got.q == np.rint(exact)).all()  # fp64 holds the product exactly
    assert (np.abs(got.q) <= act.q_max).all()


@BOTH
def test_ties_go_to_even(act: ActFormat) -> None:
    x = np.zeros(32, np.float32)
    x[:5] = [act.q_max, 0.5, 1.5, 2.5, -3.5]
    got = mxint.quantise(x, act)
    assert got.q[0, :5].tolist() == [act.q_max, 0, 2, 2, -4]


@BOTH
def test_what_cannot_be_represented_poisons_its_block_only(act: ActFormat) -> None:
    limit = np.float32(LIMIT[act])
    above = np.nextafter(limit, np.float32(np.inf))
    quiet, signalling, negative = floats(np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF]))
    for bad in (
        quiet,
        signalling,
        negative,
        np.float32(np.inf),
        np.float32(-np.inf),
        above,
        -above,
    ):
        x = np.ones(96, np.float32)
        x[40:41] = bad
        got = mxint.quantise(x, act)
        assert got.be.tolist() == [127, POISON, 127]
        assert (got.q[1] == 0).all()
        assert np.isnan(got.sx).tolist() == [False, True, False]
        assert np.isnan(got.values()[1]).all()
    x[40] = -limit
    got = mxint.quantise(x, act)
    assert got.be[1] == CEILING
    assert got.q[1, 8] == -act.q_max
    assert got.values()[1, 8] == -limit


@BOTH
def test_zeros_and_subnormals_give_the_floor_and_zero(act: ActFormat) -> None:
    tiny = floats(np.array([0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000]))
    for x in tiny:
        got = mxint.quantise(np.full(32, x), act)
        assert got.be[0] == act.floor
        assert (got.q == 0).all()
    above = mxint.quantise(np.full(32, floats(np.array([0x00800001]))[0]), act)
    assert (above.q == 1).all()


@BOTH
def test_missing_elements_of_the_last_block_are_zero(act: ActFormat) -> None:
    x = np.random.default_rng(4).standard_normal((3, 70)).astype(np.float32)
    got = mxint.quantise(x, act)
    padded = mxint.quantise(np.pad(x, ((0, 0), (0, 26))), act)
    assert got.q.shape == (3, 3, 32)
    assert (got.q == padded.q).all()
    assert (got.be == padded.be).all()
    assert mxint.quantise(x[:0], act).q.shape == (0, 3, 32)


@BOTH
def test_scales_are_normal_for_every_exponent(act: ActFormat) -> None:
    be = np.arange(act.floor, CEILING + 1)
    sx = mxint.Quantised(np.zeros((be.size, 32), np.int32), be.astype(np.uint8), act).sx
    assert (sx.astype(np.float64) == 2.0 ** (be - act.unit - 1.0)).all()
    assert sx[0] == np.finfo(np.float32).smallest_normal
    inv_bits = (act.unit + 127 - be) << 23
    inv = floats(inv_bits).astype(np.float64)
    assert (inv == 2.0 ** (act.unit - be + 0.0)).all()
    assert (inv >= 2.0**-126).all()


def test_both_slices_are_signed_bytes_for_every_q() -> None:
    act = ActFormat.MXINT16
    q = np.arange(-act.q_max, act.q_max + 1, dtype=np.int32)
    hi, lo = mxint.Quantised(q, np.array(127, np.uint8), act).slices()
    assert (256 * hi.astype(np.int32) + lo == q).all()
    assert (hi.min(), hi.max(), lo.min(), lo.max()) == (-127, 127, -128, 127)


def test_minus_128_never_occurs_in_mxint8() -> None:
    act = ActFormat.MXINT8
    hi, lo = mxint.quantise(floats(edge_bits(act)).reshape(-1, 32), act).slices()
    assert (hi == 0).all()
    assert lo.min() >= -127


def flush(x: np.ndarray) -> np.ndarray:
    """What FTZ and DAZ would make of x."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)


@st.composite
def any_bits(draw: st.DrawFn, largest: int) -> np.ndarray:
    """64 fp32 numbers of either sign whose magnitudes have bits up to `largest`."""
    magnitudes = draw(hnp.arrays(np.uint32, 64, elements=st.integers(0, largest)))
    signs = draw(hnp.arrays(np.uint32, 64, elements=st.integers(0, 1)))
    return floats(magnitudes | (signs << np.uint32(31)))


@BOTH
@given(x=any_bits(0x02000000))  # subnormals and the first normal binades
def test_flushing_subnormals_could_not_change_a_q(act: ActFormat, x: np.ndarray) -> None:
    kept, flushed = mxint.quantise(x, act), mxint.quantise(flush(x), act)
    assert (kept.be == flushed.be).all()
    assert (kept.q == flushed.q).all()
    inv = np.ldexp(np.float32(1), act.unit - kept.be.astype(int))[:, None]
    assert (np.rint(flush(flush(x).reshape(-1, 32) * inv)) == kept.q).all()


LARGEST = st.sampled_from([0x02000000, 0x3F800000, 0x76FFFFFF, 0x77800000, 0x7F800000, 0x7FFFFFFF])


@BOTH
@given(x=LARGEST.flatmap(any_bits))
def test_any_bits_give_a_quantised_or_poisoned_block(act: ActFormat, x: np.ndarray) -> None:
    got = mxint.quantise(x, act)
    assert (np.abs(got.q) <= act.q_max).all()
    for block, be, values in zip(x.reshape(-1, 32), got.be, got.values(), strict=True):
        if be == POISON:
            assert not (np.abs(block) <= LIMIT[act]).all()
        else:
            error = np.abs(block.astype(np.float64) - values)
            assert (error <= 2.0 ** (int(be) - act.unit - 1)).all()
