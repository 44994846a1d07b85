"""The C++ repack against `pack_strips`: selections of rows, slices of K, padding, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moet import _core
from moet.formats.mxfp4 import Mxfp4Matrix
from moet.formats.tiling import pack_strips, strip_bytes

U8 = NDArray[np.uint8]


def repack(codes: U8, scales: U8, strips: int, stride: int) -> tuple[int, U8]:
    """Views [N, K/2] and [N, K/32], unit stride along K -> (what it returned, [strips, stride])."""
    out = np.full((strips, stride), 0xAB, np.uint8)
    found = _core.repack_matrix(
        codes.ctypes.data,
        codes.strides[0],
        scales.ctypes.data,
        scales.strides[0],
        len(codes),
        scales.shape[1],
        out.ctypes.data,
        stride,
        strips,
    )
    return found, out


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 50),
    blocks=st.integers(1, 13),
    step=st.integers(1, 3),
    first_row=st.integers(0, 2),
    first_block=st.integers(0, 5),
    extra_strips=st.integers(0, 2),
    gap=st.sampled_from([0, 1088, 64]),
)
def test_equals_the_reference(
    *,
    seed: int,
    rows: int,
    blocks: int,
    step: int,
    first_row: int,
    first_block: int,
    extra_strips: int,
    gap: int,
) -> None:
    rng = np.random.default_rng(seed)
    height, width = first_row + rows * step, first_block + blocks + 2
    tensor = rng.integers(0, 256, (height, width * 16), np.uint8)
    tensor_scales = rng.integers(0, 255, (height, width), np.uint8)
    tensor_scales[:, :first_block] = tensor_scales[:, first_block + blocks :] = 255  # not ours
    picked, last = slice(first_row, first_row + rows * step, step), first_block + blocks
    codes = tensor[picked, 16 * first_block : 16 * last]
    scales = tensor_scales[picked, first_block:last]

    want = pack_strips(Mxfp4Matrix(codes.copy(), scales.copy()))
    strips, size = len(want) + extra_strips, strip_bytes(blocks)
    found, got = repack(codes, scales, strips, size + gap)
    assert found == -1
    assert (got[: len(want), :size] == want).all()
    assert not got[len(want) :, :size].any()
    assert (got[:, size:] == 0xAB).all()


@pytest.mark.parametrize(("row", "block"), [(0, 0), (0, 6), (17, 3), (39, 6)])
def test_a_reserved_scale_is_found_and_nothing_is_written(row: int, block: int) -> None:
    codes, scales = np.zeros((40, 7 * 16), np.uint8), np.full((40, 7), 254, np.uint8)
    scales[row, block] = scales[39, 6] = 255
    found, out = repack(codes, scales, 3, strip_bytes(7))
    assert found == row * 7 + block
    assert (out == 0xAB).all()


def test_a_reserved_scale_beyond_the_wanted_strips_is_not_looked_at() -> None:
    codes, scales = np.zeros((40, 16), np.uint8), np.full((40, 1), 127, np.uint8)
    scales[32, 0] = 255
    assert repack(codes, scales, 2, strip_bytes(1))[0] == -1
    assert repack(codes, scales, 3, strip_bytes(1))[0] == 32
