"""Strips and records against the sentences of docs/format.md."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet.base.errors import FormatError
from moet.formats import tiling
from moet.formats.mxfp4 import Mxfp4Matrix
from moet.formats.tiling import ExpertLayout, ExpertWeights

ROWS = st.integers(1, 70)
BLOCKS = st.integers(1, 13)


def matrix(rows: int, blocks: int, seed: int = 0, low: int = 0) -> Mxfp4Matrix:
    rng = np.random.default_rng(seed)
    codes = rng.integers(low, 256, (rows, 16 * blocks), dtype=np.uint8)
    return Mxfp4Matrix(codes, rng.integers(low, 255, (rows, blocks), dtype=np.uint8))


def expert(layout: ExpertLayout, seed: int = 0) -> ExpertWeights:
    rng = np.random.default_rng(seed)
    hidden, inter = layout.hidden, layout.intermediate
    sizes = (inter, inter, hidden)
    biases = [rng.standard_normal(n).astype(np.float32) for n in sizes]
    return ExpertWeights(
        matrix(inter, hidden // 32, seed),
        matrix(inter, hidden // 32, seed + 1),
        matrix(hidden, inter // 32, seed + 2),
        *(biases if layout.biased else [None] * 3),
    )


def equal(a: Mxfp4Matrix, b: Mxfp4Matrix) -> bool:
    return np.array_equal(a.codes, b.codes) and np.array_equal(a.scales, b.scales)


@given(ROWS, BLOCKS, st.integers(0, 1000))
def test_strips_round_trip(rows: int, blocks: int, seed: int) -> None:
    m = matrix(rows, blocks, seed)
    strips = tiling.pack_strips(m)
    assert strips.shape == (-(-rows // 16), -(-blocks // 4) * 1088)
    assert equal(tiling.unpack_strips(strips, rows, 32 * blocks), m)


@given(ROWS, BLOCKS)
def test_every_byte_is_where_the_page_says(rows: int, blocks: int) -> None:
    m = matrix(rows, blocks, low=1)  # no zero byte among the data: padding stands out
    strips = tiling.pack_strips(m)
    expected = np.zeros_like(strips)
    for strip, lane, b in np.ndindex(strips.shape[0], 16, blocks):
        row = 16 * strip + (lane >> 1) + 8 * (lane & 1)
        if row >= rows:
            continue
        group = b // 4 * 1088
        expected[strip, group + 1024 + b % 4 * 16 + lane] = m.scales[row, b]
        for j in range(4):
            at = group + b % 4 * 256 + j * 64 + lane * 4
            expected[strip, at : at + 4] = m.codes[row, 16 * b + 4 * j : 16 * b + 4 * j + 4]
    assert (strips == expected).all()  # padding rows, blocks and scales included: all zero


def test_lanes_put_rows_g_and_g_plus_8_side_by_side() -> None:
    assert tiling.LANE_ROWS.tolist() == [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]


@pytest.mark.parametrize("k", [0, 16, 33, 48])
def test_a_ragged_k_is_refused(k: int) -> None:
    with pytest.raises(FormatError, match="multiple of 32"):
        tiling.unpack_strips(np.zeros((1, 1088), np.uint8), 16, k)
    with pytest.raises(FormatError, match=f"intermediate size = {k} "):
        ExpertLayout(64, k)
    with pytest.raises(FormatError, match=f"hidden size = {k} "):
        ExpertLayout(k, 64)


def test_strips_of_another_matrix_are_refused() -> None:
    strips = tiling.pack_strips(matrix(20, 5))
    for rows, k in ((16, 160), (33, 160), (20, 128), (20, 288)):
        with pytest.raises(FormatError, match="do not hold"):
            tiling.unpack_strips(strips, rows, k)


def test_codes_and_scales_of_different_matrices_are_refused() -> None:
    with pytest.raises(FormatError, match="scales"):
        tiling.pack_strips(Mxfp4Matrix(matrix(16, 4).codes, matrix(16, 5).scales))


GEOMETRIES = [(2880, 2880, True), (4096, 2048, False), (5120, 2304, False), (128, 96, True)]


@pytest.mark.parametrize(("hidden", "inter", "biased"), GEOMETRIES)
def test_record_is_a_sequence_without_gaps(hidden: int, inter: int, biased: bool) -> None:
    layout = ExpertLayout(hidden, inter, biased)
    wide, narrow = -(-hidden // 128) * 1088, -(-inter // 128) * 1088
    gate_up = [f(i) for i in range(inter // 16) for f in (layout.gate_strip, layout.up_strip)]
    assert gate_up == [wide * i for i in range(inter // 8)]
    down = [layout.down_strip(i) for i in range(hidden // 16)]
    assert down == [wide * (inter // 8) + narrow * i for i in range(hidden // 16)]
    end = down[-1] + narrow
    assert (layout.gate_bias, layout.up_bias) == (end, end + 4 * inter)
    assert layout.down_bias == end + 8 * inter
    assert layout.payload_bytes == (end + 8 * inter + 4 * hidden if biased else end)
    assert layout.record_bytes % 4096 == 0
    assert 0 <= layout.record_bytes - layout.payload_bytes < 4096
    assert all(offset % 64 == 0 for offset in (*gate_up, *down, layout.gate_bias))


@given(st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_record_round_trips_and_its_padding_is_zero(h: int, i: int, biased: bool) -> None:
    layout = ExpertLayout(32 * h, 32 * i, biased)
    weights = expert(layout)
    record = np.full(layout.record_bytes, 0xAA, np.uint8)
    tiling.write_expert(layout, weights, record)
    assert (record[layout.payload_bytes :] == 0).all()
    back = tiling.read_expert(layout, record)
    for name in ("gate", "up", "down"):
        assert equal(getattr(back, name), getattr(weights, name))
    for name in ("gate_bias", "up_bias", "down_bias"):
        a, b = getattr(back, name), getattr(weights, name)
        assert (a is None and b is None) if not biased else (a == b).all()
    strips = record[: layout.down_strip(0)].reshape(-1, layout.gate_up_strip_bytes)
    assert (strips[0::2] == tiling.pack_strips(weights.gate)).all()
    assert (strips[1::2] == tiling.pack_strips(weights.up)).all()


def test_what_was_read_does_not_alias_the_record() -> None:
    layout = ExpertLayout(64, 32, True)
    record = np.zeros(layout.record_bytes, np.uint8)
    tiling.write_expert(layout, expert(layout), record)
    back = tiling.read_expert(layout, record)
    before = back.gate.codes.copy(), back.up_bias.copy()  # type: ignore[union-attr]
    record[:] = 0
    assert (back.gate.codes == before[0]).all()
    assert (back.up_bias == before[1]).all()


def test_weights_and_buffers_of_another_geometry_are_refused() -> None:
    layout = ExpertLayout(64, 96)
    record = np.zeros(layout.record_bytes, np.uint8)
    with pytest.raises(FormatError, match="gate codes"):
        tiling.write_expert(layout, expert(ExpertLayout(64, 128)), record)
    with pytest.raises(FormatError, match="gate_bias: none wanted"):
        tiling.write_expert(layout, expert(ExpertLayout(64, 96, True)), record)
    with pytest.raises(FormatError, match=r"gate_bias: float32 \[96\] wanted, none found"):
        tiling.write_expert(ExpertLayout(64, 96, True), expert(layout), record)
    with pytest.raises(FormatError, match="an expert record is"):
        tiling.write_expert(layout, expert(layout), record[:-1])
    with pytest.raises(FormatError, match="an expert record is"):
        tiling.read_expert(layout, record.astype(np.int8))
