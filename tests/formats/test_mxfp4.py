"""MXFP4: codes, scale bytes, and a quantiser whose output is a fixed point."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moet.base.errors import FormatError
from moet.formats import mxfp4

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def test_codes_are_twice_the_e2m1_values() -> None:
    assert mxfp4.E2M1_X2.dtype == np.int8
    assert mxfp4.E2M1_X2.tolist() == [*(2 * v for v in VALUES), *(-2 * v for v in VALUES)]


def test_every_packed_byte_unpacks_low_nibble_first_and_packs_again() -> None:
    packed = np.arange(256, dtype=np.uint8)[None]
    codes = mxfp4.unpack_codes(packed)
    assert codes[0, 0::2].tolist() == [b & 15 for b in range(256)]
    assert codes[0, 1::2].tolist() == [b >> 4 for b in range(256)]
    assert (mxfp4.pack_codes(codes) == packed).all()


@pytest.mark.parametrize("codes", [np.zeros((2, 3), np.uint8), np.full((1, 2), 16, np.uint8)])
def test_packing_refuses_what_is_not_pairs_of_codes(codes: np.ndarray) -> None:
    with pytest.raises(FormatError):
        mxfp4.pack_codes(codes)


@pytest.mark.parametrize("scale", [0, 1, 2, 126, 127, 128, 250, 252])
def test_dequantise_is_the_value_of_every_code(scale: int) -> None:
    codes = np.tile(np.arange(16, dtype=np.uint8), 2)[None]
    w = mxfp4.dequantise(mxfp4.pack_codes(codes), np.array([[scale]], np.uint8))
    unit = 0.0 if scale == 0 else 2.0 ** (scale - 127)
    assert w[0, :16].tolist() == [v * unit for v in (*VALUES, *(-v for v in VALUES))]
    assert np.signbit(w[0, 8])


def test_scale_values_are_never_subnormal_or_infinite() -> None:
    sw = mxfp4.scale_values(np.arange(255, dtype=np.uint8))
    assert sw[0] == 0
    assert not np.signbit(sw[0])
    assert (sw[1:] == 2.0 ** (np.arange(1, 255) - 127.0)).all()
    assert (sw[1:] >= np.finfo(np.float32).smallest_normal).all()


def test_scale_255_is_refused_by_name_and_index() -> None:
    scales = np.full((4, 6), 127, np.uint8)
    mxfp4.check_scales(scales, "fine")
    scales[2, 5] = scales[3, 0] = 255
    with pytest.raises(FormatError, match=r"experts\.7\.w2\.scale\[2, 5\] .* 255") as caught:
        mxfp4.check_scales(scales, "experts.7.w2.scale")
    assert caught.value.hint


def _nearest_even(x: float) -> float:
    """The nearest E2M1 magnitude by search; of two equally near ones the one of even index."""
    return min(range(8), key=lambda i: (abs(VALUES[i] - abs(x)), i % 2))


def test_quantise_takes_the_nearest_code_ties_to_even() -> None:
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    near = [m * f for m in midpoints for f in (0.999, 1.0, 1.001)]
    x = np.array([*near, *VALUES, 6.9, -2.5, -0.0], np.float32)
    x = np.pad(x, (0, -x.size % 31))
    blocks = np.insert(x.reshape(-1, 31), 0, 4.0, axis=1)  # 4.0 pins the scale byte to 127
    codes, scales = mxfp4.quantise(blocks.reshape(1, -1))
    assert (scales == 127).all()
    got = mxfp4.unpack_codes(codes).reshape(-1)
    want = [_nearest_even(float(v)) for v in blocks.reshape(-1)]
    assert (got & 7).tolist() == want
    assert ((got >> 3) == np.signbit(blocks.reshape(-1))).all()


@given(hnp.arrays(np.float32, (2, 64), elements=FINITE))
def test_quantising_twice_changes_no_byte(w: np.ndarray) -> None:
    first = mxfp4.quantise(w)
    again = mxfp4.quantise(mxfp4.dequantise(*first))
    assert (first.codes == again.codes).all()
    assert (first.scales == again.scales).all()


@given(hnp.arrays(np.uint8, (3, 32), elements=st.integers(0, 255)), st.integers(1, 252))
def test_canonical_bytes_survive_dequantise_and_quantise(packed: np.ndarray, scale: int) -> None:
    packed[:, ::16] |= 0x06  # a magnitude of 4 or 6 in every block: the scale is not too large
    scales = np.full((3, 2), scale, np.uint8)
    again = mxfp4.quantise(mxfp4.dequantise(packed, scales))
    assert (again.codes == packed).all()
    assert (again.scales == scales).all()


@given(hnp.arrays(np.float32, (1, 32), elements=FINITE))
def test_only_the_top_seventh_is_clipped(w: np.ndarray) -> None:
    codes, scales = mxfp4.quantise(w)
    unit = 2.0 ** (int(scales[0, 0]) - 127)
    peak = np.abs(w.astype(np.float64)).max()
    assert peak / unit < 7 or scales[0, 0] == 252
    if scales[0, 0] > 1:
        assert peak / unit >= 3.5
        assert (mxfp4.unpack_codes(codes) & 7).max() >= 6
    assert np.isfinite(mxfp4.dequantise(codes, scales)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_quantise_refuses_what_is_not_finite(bad: float) -> None:
    w = np.zeros((1, 32), np.float32)
    w[0, 3] = bad
    with pytest.raises(FormatError, match="NaN or infinite"):
        mxfp4.quantise(w)


def test_quantise_refuses_a_ragged_k() -> None:
    with pytest.raises(FormatError, match="multiple of 32"):
        mxfp4.quantise(np.zeros((1, 48), np.float32))


def test_check_matrix_names_what_is_wrong() -> None:
    good = mxfp4.quantise(np.ones((4, 64), np.float32))
    mxfp4.check_matrix(good, 4, 64, "up")
    with pytest.raises(FormatError, match=r"up codes: uint8 \[5, 32\] wanted"):
        mxfp4.check_matrix(good, 5, 64, "up")
    wrong_type = mxfp4.Mxfp4Matrix(good.codes, good.scales.astype(np.int8))
    with pytest.raises(FormatError, match="up scales"):
        mxfp4.check_matrix(wrong_type, 4, 64, "up")
