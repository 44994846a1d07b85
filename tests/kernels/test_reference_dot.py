"""Sections 3 and 4: the exact dot, the forms of t, the window, signs of zero, segments."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet.base.errors import FormatError
from moet.formats import mxfp4, mxint
from moet.formats.mxfp4 import Mxfp4Matrix
from moet.formats.mxint import CEILING, POISON, ActFormat, Quantised
from moet.kernels import reference
from moet.kernels.reference import fma32
from moet.testing.exact import differing, fma_rational

BOTH = pytest.mark.parametrize("act", list(ActFormat), ids=lambda a: a.name)
WINDOW = {ActFormat.MXINT8: (135, 388), ActFormat.MXINT16: (143, 396)}
D_MAX = {ActFormat.MXINT8: 48_768, ActFormat.MXINT16: 12_533_376}
MAGIC = np.float32(12582912)


def sx_of(be: np.ndarray, act: ActFormat) -> np.ndarray:
    return Quantised(np.zeros((*be.shape, 32), np.int32), be.astype(np.uint8), act).sx


def sw_of(ew: np.ndarray) -> np.ndarray:
    return mxfp4.scale_values(np.asarray(ew).astype(np.uint8))


def random_case(
    act: ActFormat, shape: tuple[int, int, int], rng: np.random.Generator
) -> tuple[Mxfp4Matrix, Quantised]:
    """Random codes and q of full range, plausible scales; shape = (rows, tokens, blocks)."""
    rows, tokens, blocks = shape
    codes = rng.integers(0, 256, (rows, 16 * blocks), dtype=np.uint8)
    scales = rng.integers(113, 126, (rows, blocks)).astype(np.uint8)
    q = rng.integers(-act.q_max, act.q_max + 1, (tokens, blocks, 32)).astype(np.int32)
    be = rng.integers(121, 134, (tokens, blocks)).astype(np.uint8)
    return Mxfp4Matrix(codes, scales), Quantised(q, be, act)


def tot_by_hand(matrix: Mxfp4Matrix, x: Quantised, row: int, token: int) -> float:
    """Sections 3 and 4 for one output, in rational arithmetic and Python loops."""
    w2 = mxfp4.E2M1_X2[mxfp4.unpack_codes(matrix.codes[row])].astype(int).reshape(-1, 32)
    tot = None
    for start in range(0, len(w2), 16):
        acc = 0.0
        for b in range(start, min(start + 16, len(w2))):
            d = sum(int(w) * int(q) for w, q in zip(w2[b], x.q[token, b], strict=True))
            t = float(d) * float(x.sx[token, b])
            acc = fma_rational(t, float(sw_of(matrix.scales[row, b])), acc)
        tot = acc if tot is None else fma_rational(1.0, tot, acc)
    assert tot is not None
    return tot


# ---- the integer dot


@BOTH
def test_dot_is_exact(act: ActFormat) -> None:
    matrix, x = random_case(act, (40, 7, 5), np.random.default_rng(1))
    w2 = mxfp4.E2M1_X2[mxfp4.unpack_codes(matrix.codes)].astype(np.int64).reshape(40, 5, 32)
    want = np.einsum("nbk,tbk->btn", w2, x.q.astype(np.int64))
    got = reference.dot_blocks(matrix.codes, x.q)
    assert got.dtype == np.int32
    assert (got == want).all()


@BOTH
def test_the_largest_dot_is_the_bound_and_below_2_24(act: ActFormat) -> None:
    codes = np.stack((np.full(16, 0x77, np.uint8), np.full(16, 0xFF, np.uint8)))
    q = np.full((1, 1, 32), act.q_max, np.int32)
    d = reference.dot_blocks(codes, q)
    assert d[0, 0].tolist() == [D_MAX[act], -D_MAX[act]]
    assert D_MAX[act] < 2**24


# ---- the forms of t


def d_and_be(act: ActFormat) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(d [n, 1], be [m]) in pieces: all of both in MXINT8; edges and 20,000 random d in MXINT16."""
    limit = D_MAX[act]
    d = np.arange(-limit, limit + 1)
    if act is ActFormat.MXINT16:
        powers = 1 << np.arange(24)
        edges = [powers - 1, powers, powers + 1, limit - np.arange(300), np.arange(300)]
        random = np.random.default_rng(2).integers(0, limit + 1, 10_000)
        positive = np.unique(np.concatenate((*edges, random)))
        d = np.concatenate((-positive, positive[positive <= limit]))
    d = d[np.abs(d) <= limit]
    for be in np.array_split(np.arange(act.floor, CEILING + 1), 24):
        yield d[:, None].astype(np.int32), be


@BOTH
def test_t_is_exact_and_never_subnormal_or_infinite(act: ActFormat) -> None:
    for d, be in d_and_be(act):
        t = d.astype(np.float32) * sx_of(be, act)
        assert (t.astype(np.float64) == np.ldexp(d.astype(np.float64), be - act.unit - 1)).all()
        magnitudes = np.abs(t[d[:, 0] != 0])
        assert magnitudes.min() >= np.finfo(np.float32).smallest_normal
        assert magnitudes.max() <= np.finfo(np.float32).max
        assert not np.signbit(t[d[:, 0] == 0]).any()


def unconverted(integer: np.ndarray) -> np.ndarray:
    """What an integer accumulator that started at 0x4B400000 reads as fp32."""
    return (integer + 0x4B400000).astype(np.int32).view(np.float32)


def test_t_without_conversion_is_exact_in_mxint8() -> None:
    for d, be in d_and_be(ActFormat.MXINT8):
        sx = sx_of(be, ActFormat.MXINT8)
        constant = -MAGIC * sx
        assert np.isfinite(constant).all()
        assert differing(fma32(unconverted(d), sx, constant), d.astype(np.float32) * sx).size == 0


def test_t_without_conversion_is_exact_in_mxint16() -> None:
    edges = [-49_152, -49_151, -1, 0, 1, 127, 128, 48_767, 48_768]
    rng = np.random.default_rng(3)
    low = np.concatenate((np.repeat(edges, 9), rng.integers(-49_152, 49_153, 4000)))
    high = np.concatenate((np.tile(edges, 9), rng.integers(-48_768, 48_769, 4000)))
    keep = np.abs(256 * high + low) <= D_MAX[ActFormat.MXINT16]
    low, high = low[keep][:, None], high[keep][:, None]
    for be in np.array_split(np.arange(16, CEILING + 1), 8):
        sx = sx_of(be, ActFormat.MXINT16)
        constant = np.float32(-257 * 12582912) * sx
        assert np.isfinite(constant).all()
        inner = fma32(unconverted(high), np.float32(256) * sx, constant)
        t = fma32(unconverted(low), sx, inner)
        assert differing(t, (256 * high + low).astype(np.float32) * sx).size == 0


def test_one_more_than_the_ceiling_would_break_the_conversion_free_form() -> None:
    for factor, unit in ((1.0, 133), (257.0, 141)):
        finite = [factor * 12582912 * 2.0 ** (be - unit - 1) < 2.0**128 for be in (238, 239)]
        assert finite == [True, False]


# ---- form S and the window


def forms(
    d: np.ndarray, ew: np.ndarray, be: np.ndarray, acc: np.ndarray, act: ActFormat
) -> tuple[np.ndarray, np.ndarray]:
    sw, sx, real = sw_of(ew), sx_of(be, act), d.astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        return fma32(real * sx, sw, acc), fma32(real, sw * sx, acc)


def sample(act: ActFormat, ew_be: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Random d, acc of any bits, and (ew, be) with the given sums."""
    lowest = np.maximum(act.floor, ew_be - 254)
    be = rng.integers(lowest, np.minimum(CEILING, ew_be) + 1)
    d = rng.integers(-D_MAX[act], D_MAX[act] + 1, be.size)
    d = np.where(rng.random(be.size) < 0.3, rng.integers(-3, 4, be.size), d)
    acc = rng.integers(0, 1 << 32, be.size, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = np.ldexp(d.astype(np.float32), np.clip(ew_be - 128 - act.unit, -160, 100))
    acc = np.where(rng.random(be.size) < 0.7, -near, acc).astype(np.float32)
    return d, ew_be - be, be, acc


@BOTH
def test_form_s_equals_form_t_in_the_window(act: ActFormat) -> None:
    low, high = WINDOW[act]
    rng = np.random.default_rng(4)
    d, ew, be, acc = sample(act, np.repeat(np.arange(low, high + 1), 1500), rng)
    assert ew.min() >= 0
    assert differing(*forms(d, ew, be, acc, act)).size == 0
    zero_scale = np.zeros_like(ew)
    assert differing(*forms(d, zero_scale, be, acc, act)).size == 0


@BOTH
def test_form_s_differs_outside_the_window(act: ActFormat) -> None:
    """Negative control: past both ends. (Just below LO, S needs subnormals, and still is right.)"""
    low, high = WINDOW[act]
    rng = np.random.default_rng(5)
    for outside in (np.arange(act.floor + 1, low - 24), np.arange(high + 1, 254 + CEILING + 1)):
        d, ew, be, acc = sample(act, np.repeat(outside, 200), rng)
        assert differing(*forms(d, ew, be, acc, act)).size > 0


@BOTH
def test_poison_is_nan_in_both_forms(act: ActFormat) -> None:
    be = np.array([POISON])
    for ew in (0, 1, 127, 254):
        for form in forms(np.array([0]), np.array([ew]), be, np.float32([1]), act):
            assert np.isnan(form).all()


@BOTH
def test_sums_are_never_minus_zero_or_subnormal_in_the_window(act: ActFormat) -> None:
    rng = np.random.default_rng(6)
    low = WINDOW[act][0]
    tokens, blocks, rows = 1, 16, 2000
    be = np.full((tokens, blocks), act.floor)
    ew = rng.integers(low - act.floor, low - act.floor + 3, (rows, blocks))
    ew[:, ::5] = 0
    d = rng.integers(-2, 3, (blocks, tokens, rows)).astype(np.int32)
    tot = reference.accumulate(d, ew.astype(np.uint8), sx_of(be, act))
    assert (tot == 0).any()
    assert not np.signbit(tot[tot == 0]).any()
    assert (np.abs(tot[tot != 0]) >= np.finfo(np.float32).smallest_normal).all()


def tiny(act: ActFormat, d: list[int]) -> np.ndarray:
    """tot of one row whose blocks have ew + be far below the window."""
    blocks = len(d)
    ew, be = np.ones((1, blocks), np.uint8), np.full((1, blocks), act.floor)
    return reference.accumulate(np.array(d, np.int32).reshape(-1, 1, 1), ew, sx_of(be, act))[0, 0]


@BOTH
def test_minus_zero_and_why_zero_blocks_may_not_be_skipped_or_added(act: ActFormat) -> None:
    assert tiny(act, [0]).view(np.uint32) == 0
    assert tiny(act, [-1]).view(np.uint32) == 0x80000000  # a tiny negative product underflows
    assert tiny(act, [-1, 0]).view(np.uint32) == 0  # a block with d = 0 turns it into +0
    assert tiny(act, [-1] * 17).view(np.uint32) == 0x80000000
    assert tiny(act, [-1] * 16 + [0]).view(np.uint32) == 0  # so does an all-zero segment


# ---- segments


@BOTH
@pytest.mark.parametrize("blocks", [1, 8, 9, 16, 17, 18, 32, 33, 45, 90, 224])
def test_segments_and_order_by_hand(act: ActFormat, blocks: int) -> None:
    rng = np.random.default_rng(blocks)
    matrix, x = random_case(act, (19, 3, blocks), rng)
    tot = reference.matmul(matrix, x)
    outputs = [(0, 0), (18, 2), (7, 1)]
    want = np.array([tot_by_hand(matrix, x, n, t) for n, t in outputs], np.float32)
    got = np.array([tot[t, n] for n, t in outputs])
    assert differing(got, want).size == 0


@BOTH
@given(st.integers(1, 20), st.integers(0, 127), st.integers(0, 10_000))
def test_extreme_scales_by_hand(act: ActFormat, blocks: int, span: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix, x = random_case(act, (2, 2, blocks), rng)
    scales = rng.integers(max(0, 120 - span), min(254, 120 + span) + 1, matrix.scales.shape)
    be = rng.integers(max(act.floor, 127 - span), min(CEILING, 127 + span) + 1, x.be.shape)
    q = np.where(rng.random(x.q.shape) < 0.9, 0, x.q).astype(np.int32)  # small d too
    matrix = Mxfp4Matrix(matrix.codes, scales.astype(np.uint8))
    x = Quantised(q, be.astype(np.uint8), act)
    tot = reference.matmul(matrix, x)
    want = [[tot_by_hand(matrix, x, n, t) for n in range(2)] for t in range(2)]
    assert differing(tot, np.array(want, np.float32)).size == 0


@BOTH
def test_order_matters_so_the_tests_above_can_fail(act: ActFormat) -> None:
    matrix, x = random_case(act, (500, 1, 40), np.random.default_rng(8))
    d = reference.dot_blocks(matrix.codes, x.q)
    backwards = reference.accumulate(d[::-1], matrix.scales[:, ::-1], x.sx[:, ::-1])
    assert differing(backwards, reference.accumulate(d, matrix.scales, x.sx)).size > 50


@BOTH
def test_a_matmul_does_not_depend_on_how_it_is_cut(act: ActFormat) -> None:
    matrix, x = random_case(act, (300, 130, 33), np.random.default_rng(9))
    whole = reference.matmul(matrix, x)
    for token, row in ((0, 0), (64, 255), (129, 299)):
        one = Mxfp4Matrix(matrix.codes[row : row + 1], matrix.scales[row : row + 1])
        part = Quantised(x.q[token : token + 1], x.be[token : token + 1], act)
        assert differing(reference.matmul(one, part)[0], whole[token, row : row + 1]).size == 0


@BOTH
def test_a_poisoned_block_makes_all_rows_of_its_token_nan(act: ActFormat) -> None:
    rng = np.random.default_rng(10)
    matrix, _ = random_case(act, (20, 1, 20), rng)
    matrix.scales[:, 3] = 0  # even a zero weight block does not hide it
    x = rng.standard_normal((3, 640)).astype(np.float32)
    clean = reference.matmul(matrix, mxint.quantise(x, act))
    x[1, 100] = np.inf
    tot = reference.matmul(matrix, mxint.quantise(x, act))
    assert np.isnan(tot[1]).all()
    assert differing(tot[::2], clean[::2]).size == 0


def test_a_scale_byte_255_is_refused() -> None:
    matrix, x = random_case(ActFormat.MXINT8, (4, 1, 3), np.random.default_rng(11))
    matrix.scales[2, 1] = 255
    with pytest.raises(FormatError, match=r"scales\[2, 1\]"):
        reference.matmul(matrix, x)


@pytest.mark.parametrize(
    ("signs", "want"),
    [([1, 1], np.inf), ([-1, 1], -np.inf), ([1] * 16 + [-1], np.nan)],
    ids=["overflow", "infinity stays", "segments of both signs"],
)
def test_overflow_becomes_infinity_and_then_nan(signs: list[int], want: float) -> None:
    act = ActFormat.MXINT8
    ew, be = np.full((1, len(signs)), 254, np.uint8), np.full((1, len(signs)), CEILING)
    d = (np.array(signs, np.int32) * D_MAX[act]).reshape(-1, 1, 1)
    tot = reference.accumulate(d, ew, sx_of(be, act))
    np.testing.assert_equal(tot, np.float32([[want]]))
