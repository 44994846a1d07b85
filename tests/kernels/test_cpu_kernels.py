"""Quantiser and strips of every instruction set against the reference, bit for bit.

What a table keeps inside a quantised vector is its own business, so the quantiser is judged by what
a strip of ones reads out of it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moet import _core
from moet.base.errors import KernelError
from moet.formats import mxint
from moet.formats.mxfp4 import Mxfp4Matrix, pack_codes
from moet.formats.mxint import ActFormat
from moet.formats.tiling import GROUP_BLOCKS, GROUP_BYTES, TILE_BYTES, pack_strips
from moet.kernels import reference
from moet.kernels.cpu import isa_available
from moet.kernels.rounding import check_environment
from moet.kernels.spec import DType
from moet.testing.exact import differing
from moet.verify.cases import aligned_bytes, widened

Array = NDArray[Any]
F32 = NDArray[np.float32]
ISAS = isa_available()
EACH_ISA = pytest.mark.parametrize("isa", ISAS)
EACH_ACT = pytest.mark.parametrize("act", list(ActFormat), ids=lambda a: a.name)
FTZ_AND_DAZ = 0x8040


def quantise(isa: str, x: Array, act: ActFormat) -> Array:
    """x [T, K] (fp32, fp16, or uint16 holding bf16) -> quantised vectors, uint8 [T, bytes]."""
    kind = {np.dtype(np.float32): DType.F32, np.dtype(np.float16): DType.F16}.get(x.dtype)
    tokens, k = x.shape
    size = _core.quantised_bytes(-(-k // 32), act)
    out = aligned_bytes(tokens * size).reshape(tokens, size)
    for row, to in zip(x, out, strict=True):
        _core.quantise(
            isa, row.ctypes.data, DType.BF16 if kind is None else kind, k, act, to.ctypes.data
        )
    return out


def strips(isa: str, packed: Array, blocks: int, xs: Array, act: ActFormat) -> F32:
    """Every strip [S, bytes] times every quantised vector [T, bytes]: fp32 [T, 16 S]."""
    vectors = [x.ctypes.data for x in xs]
    out = np.empty((len(packed), len(xs) + 1, 16), np.float32)
    out[:, -1] = 3.0
    for strip, to in zip(packed, out, strict=True):
        _core.strip(isa, strip.ctypes.data, blocks, vectors, act, to.ctypes.data)
    assert (out[:, -1] == 3.0).all()  # nothing is written past the last vector
    return out[:, :-1].transpose(1, 0, 2).reshape(len(xs), -1)


def same(got: F32, want: F32) -> bool:
    """Equal bits, and NaN where NaN is wanted."""
    return got.shape == want.shape and differing(np.ascontiguousarray(got), want).size == 0


@contextmanager
def flushing() -> Iterator[None]:
    """This thread flushes subnormals, as after loading a library built with fast-math."""
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    kept, changed = (ctypes.c_uint32 * 8)(), (ctypes.c_uint32 * 8)()
    libm.fegetenv(kept)
    libm.fegetenv(changed)
    changed[7] |= FTZ_AND_DAZ  # the last word of fenv_t is MXCSR
    libm.fesetenv(changed)
    try:
        yield
    finally:
        libm.fesetenv(kept)


# ---- the quantiser


def identity() -> Array:
    """Two strips whose row k is 1.0 at k: their tot is what the elements of one block stand for."""
    codes = pack_codes(2 * np.eye(32, dtype=np.uint8))
    return pack_strips(Mxfp4Matrix(codes, np.full((32, 1), 127, np.uint8)))


def read_back(isa: str, blocks: Array, act: ActFormat) -> F32:
    """Blocks [B, 32] as the quantised vectors hold them, fp32 [B, 32]."""
    return strips(isa, identity(), 1, quantise(isa, blocks, act), act)


def check_quantiser(isa: str, blocks: Array, act: ActFormat) -> None:
    want = mxint.quantise(widened(blocks), act)
    assert same(read_back(isa, blocks, act), want.values()[:, 0])


@EACH_ISA
@EACH_ACT
def test_quantises_every_exponent_and_the_edges_of_the_carry(isa: str, act: ActFormat) -> None:
    rng = np.random.default_rng(1)
    edges = [0, 1, 0x7DFFFF, 0x7E0000, 0x7E0001, 0x7EFE00, 0x7EFE01, 0x7EFF00, 0x7FFFFF]
    amax = (np.arange(256, dtype=np.uint32)[:, None] << 23 | np.array(edges, np.uint32)).ravel()
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        blocks = amax.view(np.float32)[:, None] * rng.uniform(-1, 1, (len(amax), 32))
    blocks = blocks.astype(np.float32)
    blocks[np.arange(len(amax)), rng.integers(0, 32, len(amax))] = amax.view(np.float32)
    check_quantiser(isa, blocks, act)


@EACH_ISA
@EACH_ACT
@pytest.mark.parametrize("kind", [np.float16, np.uint16], ids=["fp16", "bf16"])
def test_widens_every_16_bit_float(isa: str, act: ActFormat, kind: type) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    order = np.random.default_rng(2).permutation(patterns)
    check_quantiser(isa, patterns.view(kind).reshape(-1, 32), act)  # like beside like
    check_quantiser(isa, order.view(kind).reshape(-1, 32), act)


@EACH_ISA
@EACH_ACT
def test_quantises_ties_to_even(isa: str, act: ActFormat) -> None:
    halves = np.arange(-2 * act.q_max, 2 * act.q_max + 1, dtype=np.float32) / 2
    halves = np.resize(halves, (-(-len(halves) // 31), 31))
    top = np.full((len(halves), 1), act.q_max, np.float32)
    check_quantiser(isa, np.concatenate((halves, top), axis=1), act)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.floats(width=32), min_size=32, max_size=32),
    st.sampled_from(ActFormat),
    st.sampled_from(ISAS),
)
def test_quantises_whatever_hypothesis_finds(x: list[float], act: ActFormat, isa: str) -> None:
    check_quantiser(isa, np.array([x], np.float32), act)


@EACH_ISA
@EACH_ACT
@pytest.mark.parametrize("k", [1, 31, 33, 40, 70])
def test_missing_elements_of_the_last_block_are_zero(isa: str, act: ActFormat, k: int) -> None:
    x = np.random.default_rng(k).standard_normal((3, k + 5)).astype(np.float32)
    x[:, k:] = np.nan  # beyond the vector
    padded = np.zeros((3, -(-k // 32) * 32), np.float32)
    padded[:, :k] = x[:, :k]
    size = _core.quantised_bytes(-(-k // 32), act)
    for row, whole in zip(x, quantise(isa, padded, act), strict=True):
        got = aligned_bytes(size + 64)
        got[:] = 0xAB
        _core.quantise(isa, row.ctypes.data, DType.F32, k, act, got.ctypes.data)
        raw = padded.shape[1] // 32 * (32 * act // 8 + 4 + 4 * (act // 8))
        assert got[:raw].tobytes() == whole[:raw].tobytes()
        assert (got[size:] == 0xAB).all()


# ---- strips


@dataclass(frozen=True)
class StripCase:
    """A matrix and activations, drawn from a seed. Kinds pick plain or extreme values."""

    seed: int
    blocks: int
    rows: int
    tokens: int
    act: ActFormat
    weights: str = "plain"
    scales: str = "plain"
    x_kind: str = "plain"

    def matrix(self) -> Mxfp4Matrix:
        rng = np.random.default_rng([self.seed, 1])
        shape = (self.rows, self.blocks)
        codes = {
            "plain": rng.integers(0, 256, (self.rows, 16 * self.blocks), np.uint8),
            "largest": np.full((self.rows, 16 * self.blocks), 0x77, np.uint8),
            "smallest": np.full((self.rows, 16 * self.blocks), 0xFF, np.uint8),
        }
        scales = {
            "plain": rng.integers(113, 126, shape, np.uint8),
            "any": rng.integers(0, 255, shape, np.uint8),
            "zero": rng.integers(0, 2, shape, np.uint8) * rng.integers(0, 3, shape, np.uint8),
            "huge": rng.integers(240, 255, shape, np.uint8),
        }
        return Mxfp4Matrix(codes[self.weights], scales[self.scales])

    def x(self) -> F32:
        rng = np.random.default_rng([self.seed, 2])
        x = rng.standard_normal((self.tokens, self.blocks, 32))
        if self.x_kind == "full":
            x = np.sign(x) * self.act.q_max
        if self.x_kind == "wild":  # every exponent, zeros and subnormals, some poisoned tokens
            x = x * np.exp2(rng.integers(-140, 113, (self.tokens, self.blocks, 1)))
            x[rng.random(x.shape) < 0.05] = -0.0
            x[rng.random(x.shape) < 0.05] = 1e-42
            bad = rng.random((self.tokens, 1, 1)) < 0.3
            x[bad & (rng.random(x.shape) < 0.01)] = np.nan
            x[bad & (rng.random(x.shape) < 0.01)] = -np.inf
        return x.reshape(self.tokens, -1).astype(np.float32)


def check_strips(case: StripCase, isa: str) -> None:
    matrix, x = case.matrix(), case.x()
    want = reference.matmul(matrix, mxint.quantise(x, case.act))
    xs = quantise(isa, x, case.act)
    got = strips(isa, pack_strips(matrix), case.blocks, xs, case.act)
    assert same(got[:, : case.rows], want)
    padding = got[:, case.rows :]
    assert ((padding == 0) | np.isnan(padding)).all()


strip_cases = st.builds(
    StripCase,
    seed=st.integers(0, 2**32),
    blocks=st.one_of(st.integers(1, 20), st.sampled_from([31, 32, 33, 45])),
    rows=st.integers(1, 40),
    tokens=st.one_of(st.integers(1, 18), st.just(64)),
    act=st.sampled_from(ActFormat),
    weights=st.sampled_from(["plain", "largest", "smallest"]),
    scales=st.sampled_from(["plain", "any", "zero", "huge"]),
    x_kind=st.sampled_from(["plain", "full", "wild"]),
)


@settings(deadline=None, max_examples=200)
@given(strip_cases, st.sampled_from(ISAS))
def test_strips_equal_the_reference(case: StripCase, isa: str) -> None:
    check_strips(case, isa)


@EACH_ISA
@EACH_ACT
@pytest.mark.parametrize("blocks", [1, 8, 9, 18, 45, 90, 224])
def test_widths_of_real_models(isa: str, act: ActFormat, blocks: int) -> None:
    check_strips(StripCase(blocks, blocks, 16, 5, act), isa)
    check_strips(StripCase(blocks, blocks, 16, 3, act, "plain", "any", "wild"), isa)


@EACH_ISA
@EACH_ACT
def test_the_largest_sums_do_not_overflow(isa: str, act: ActFormat) -> None:
    """A largest d in every lane, of both signs: AVX2 sums it in 16 bits."""
    for weights in ("largest", "smallest"):
        check_strips(StripCase(1, 17, 16, 9, act, weights, "plain", "full"), isa)


@EACH_ISA
@EACH_ACT
def test_a_token_has_the_same_bits_in_any_company(isa: str, act: ActFormat) -> None:
    case = StripCase(5, 19, 16, 64, act, x_kind="wild", scales="any")
    packed, xs = pack_strips(case.matrix()), quantise(isa, case.x(), act)
    alone = np.concatenate([strips(isa, packed, 19, xs[t : t + 1], act) for t in range(64)])
    assert np.isnan(alone).any()
    assert not np.isnan(alone).all()
    for m in range(1, 65):
        assert same(strips(isa, packed, 19, xs[:m], act), alone[:m])
    order = np.random.default_rng(6).permutation(64)
    assert same(strips(isa, packed, 19, xs[order], act), alone[order])


@EACH_ISA
@EACH_ACT
@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 18, 19])
def test_padding_blocks_are_never_read_as_blocks(isa: str, act: ActFormat, blocks: int) -> None:
    case = StripCase(7, blocks, 16, 6, act)
    packed, xs = pack_strips(case.matrix()), quantise(isa, case.x(), act)
    want = strips(isa, packed, blocks, xs, act)
    used, split = (blocks - 1) % GROUP_BLOCKS + 1, GROUP_BLOCKS * TILE_BYTES
    group = packed[0, -GROUP_BYTES:]
    group[used * TILE_BYTES : split] = 0x77
    group[split + 16 * used :] = 254
    assert same(strips(isa, packed, blocks, xs, act), want)


@EACH_ISA
@EACH_ACT
def test_signs_of_zero(isa: str, act: ActFormat) -> None:
    """Products that underflow to -0, and what +0 makes of them: a last block of zeros shows."""
    codes = np.full((16, 16 * 18), 0x99, np.uint8)  # w2 = -1 everywhere
    codes[:8, 16 * 17 :] = 0
    scales = np.zeros((16, 18), np.uint8)
    scales[:, 1] = scales[:, 17] = 1
    x = np.full((3, 18 * 32), 2.0**-126 * 8, np.float32)
    x[1, 17 * 32 :] = 0
    matrix = Mxfp4Matrix(codes, scales)
    want = reference.matmul(matrix, mxint.quantise(x, act))
    assert same(strips(isa, pack_strips(matrix), 18, quantise(isa, x, act), act), want)
    assert np.signbit(want[want == 0]).any()


@EACH_ACT
def test_instruction_sets_agree_with_each_other(act: ActFormat) -> None:
    case = StripCase(8, 90, 48, 13, act, x_kind="wild", scales="any")
    first, *others = [
        strips(isa, pack_strips(case.matrix()), 90, quantise(isa, case.x(), act), act)
        for isa in ISAS
    ]
    if not others:
        pytest.skip("this machine has only the portable kernels")
    assert all(same(other, first) for other in others)


@EACH_ISA
@EACH_ACT
def test_a_caller_that_flushes_subnormals_changes_nothing(isa: str, act: ActFormat) -> None:
    case = StripCase(9, 17, 16, 8, act, scales="zero", x_kind="wild")
    packed, x = pack_strips(case.matrix()), case.x()
    want = reference.matmul(case.matrix(), mxint.quantise(x, act))
    tiny = np.abs(want[np.isfinite(want)])
    assert ((tiny > 0) & (tiny < 2.0**-126)).any()  # flushing would be seen
    with flushing():
        with pytest.raises(KernelError, match="flushes"):
            check_environment()
        got = strips(isa, packed, 17, quantise(isa, x, act), act)
        with pytest.raises(KernelError, match="flushes"):
            check_environment()  # and it is the caller's again
    check_environment()
    assert same(got, want)
