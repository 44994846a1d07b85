"""Tiles, strips and the expert record: docs/format.md in numpy.

A strip is 16 rows over all of K. Lane l of a strip holds row (l >> 1) + 8 * (l & 1). A block of
32 k is a tile of dwords [j = 0..3][lane]: dword (j, lane) is the checkpoint's own four bytes for
k = 8j..8j+7. Four blocks make a group: 4 x 256 code bytes, then 4 x 16 scale bytes. The last group
is padded with zero bytes. Repacking moves dwords and never looks inside one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import FormatError
from moet.formats.mxfp4 import BLOCK, BLOCK_BYTES, Mxfp4Matrix, check_matrix

STRIP_ROWS: Final = 16
GROUP_BLOCKS: Final = 4
TILE_BYTES: Final = STRIP_ROWS * BLOCK_BYTES
GROUP_BYTES: Final = GROUP_BLOCKS * (TILE_BYTES + STRIP_ROWS)
RECORD_ALIGNMENT: Final = 4096
TILE_VERSION: Final = 1
"""Of everything in this file; a record on disk says which one it was written by."""

LANE_ROWS: Final[NDArray[np.intp]] = np.array([(i >> 1) + 8 * (i & 1) for i in range(STRIP_ROWS)])
"""Row of a strip that each lane holds."""

_DWORDS = BLOCK_BYTES // 4


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def strip_bytes(blocks: int) -> int:
    """Bytes of one strip (16 rows) of `blocks` blocks along K."""
    return ceil_div(blocks, GROUP_BLOCKS) * GROUP_BYTES


def check_k(k: int, what: str) -> None:
    """Refuses a K that is not a whole number of blocks.

    Raises:
        FormatError: names the dimension.
    """
    if k <= 0 or k % BLOCK:
        raise FormatError(
            f"{what} = {k} is not a positive multiple of 32",
            hint="MXFP4 experts need whole blocks of 32; lower the tensor-parallel degree",
        )


def pack_strips(matrix: Mxfp4Matrix) -> NDArray[np.uint8]:
    """A matrix [N, K] -> its strips, u8 [ceil(N/16), strip_bytes]; rows past N are zero rows.

    Raises:
        FormatError: K is not a multiple of 32, or the two arrays do not fit together.
    """
    rows, k = matrix.codes.shape[0], 2 * matrix.codes.shape[1]
    check_k(k, "K")
    check_matrix(matrix, rows, k, "matrix")
    strips, blocks = ceil_div(rows, STRIP_ROWS), k // BLOCK
    groups = ceil_div(blocks, GROUP_BLOCKS)

    codes = np.zeros((strips, STRIP_ROWS, groups * GROUP_BLOCKS, _DWORDS, 4), np.uint8)
    codes.reshape(strips * STRIP_ROWS, -1)[:rows, : k // 2] = matrix.codes
    scales = np.zeros((strips, STRIP_ROWS, groups * GROUP_BLOCKS), np.uint8)
    scales.reshape(strips * STRIP_ROWS, -1)[:rows, :blocks] = matrix.scales

    tiles = codes[:, LANE_ROWS].transpose(0, 2, 3, 1, 4)  # [strip, block, j, lane, byte]
    lanes = scales[:, LANE_ROWS].transpose(0, 2, 1)  # [strip, block, lane]
    parts = (tiles.reshape(strips, groups, -1), lanes.reshape(strips, groups, -1))
    return np.concatenate(parts, axis=2).reshape(strips, -1)


def unpack_strips(strips: NDArray[np.uint8], rows: int, k: int) -> Mxfp4Matrix:
    """The inverse of `pack_strips` for the first `rows` rows; padding is dropped.

    Args:
        strips: u8 [ceil(rows/16), strip_bytes(k/32)].
        rows: N.
        k: K, a multiple of 32.

    Raises:
        FormatError: the strips do not have the size of an [N, K] matrix.
    """
    check_k(k, "K")
    blocks, count = k // BLOCK, ceil_div(rows, STRIP_ROWS)
    if strips.shape != (count, strip_bytes(blocks)):
        raise FormatError(
            f"strips {list(strips.shape)} do not hold a [{rows}, {k}] matrix",
            hint=f"{count} strips of {strip_bytes(blocks)} bytes wanted",
        )
    groups = strips.reshape(count, -1, GROUP_BYTES)
    split = GROUP_BLOCKS * TILE_BYTES
    tiles = groups[..., :split].reshape(count, -1, _DWORDS, STRIP_ROWS, 4)
    lanes = groups[..., split:].reshape(count, -1, STRIP_ROWS)
    lane_of_row = np.argsort(LANE_ROWS)
    codes = tiles[..., lane_of_row, :].transpose(0, 3, 1, 2, 4).reshape(count * STRIP_ROWS, -1)
    scales = lanes[..., lane_of_row].transpose(0, 2, 1).reshape(count * STRIP_ROWS, -1)
    return Mxfp4Matrix(
        np.ascontiguousarray(codes[:rows, : k // 2]), np.ascontiguousarray(scales[:rows, :blocks])
    )


@dataclass(frozen=True)
class ExpertWeights:
    """One expert as the checkpoint's maths sees it (H hidden, I intermediate).

    Attributes:
        gate: [I, H]; `w1` in some families.
        up: [I, H]; `w3`.
        down: [H, I]; `w2`.
        gate_bias: fp32 [I] or None; all three biases are there, or none.
        up_bias: fp32 [I] or None.
        down_bias: fp32 [H] or None.
    """

    gate: Mxfp4Matrix
    up: Mxfp4Matrix
    down: Mxfp4Matrix
    gate_bias: NDArray[np.float32] | None = None
    up_bias: NDArray[np.float32] | None = None
    down_bias: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class ExpertLayout:
    """Where everything lies in the record of one expert; offsets and sizes in bytes.

    Attributes:
        hidden: H, a multiple of 32.
        intermediate: I, a multiple of 32 (of this rank's slice under tensor parallelism).
        biased: fp32 biases follow the strips.

    Raises:
        FormatError: H or I is not a multiple of 32.
    """

    hidden: int
    intermediate: int
    biased: bool = False

    def __post_init__(self) -> None:
        check_k(self.hidden, "hidden size")
        check_k(self.intermediate, "intermediate size")

    @property
    def intermediate_strips(self) -> int:
        """Strips of gate, and of up."""
        return ceil_div(self.intermediate, STRIP_ROWS)

    @property
    def hidden_strips(self) -> int:
        """Strips of down."""
        return ceil_div(self.hidden, STRIP_ROWS)

    @property
    def gate_up_strip_bytes(self) -> int:
        """Bytes of one gate or up strip (K = H)."""
        return strip_bytes(self.hidden // BLOCK)

    @property
    def down_strip_bytes(self) -> int:
        """Bytes of one down strip (K = I)."""
        return strip_bytes(self.intermediate // BLOCK)

    def gate_strip(self, i: int) -> int:
        """Offset of gate strip i."""
        return 2 * i * self.gate_up_strip_bytes

    def up_strip(self, i: int) -> int:
        """Offset of up strip i: right behind gate strip i."""
        return (2 * i + 1) * self.gate_up_strip_bytes

    def down_strip(self, i: int) -> int:
        """Offset of down strip i."""
        return self.gate_strip(self.intermediate_strips) + i * self.down_strip_bytes

    @property
    def gate_bias(self) -> int:
        """Offset of the gate bias, fp32 [I rounded up to 16]; meaningless unless `biased`."""
        return self.down_strip(self.hidden_strips)

    @property
    def up_bias(self) -> int:
        """Offset of the up bias, fp32 [I rounded up to 16]."""
        return self.gate_bias + 4 * STRIP_ROWS * self.intermediate_strips

    @property
    def down_bias(self) -> int:
        """Offset of the down bias, fp32 [H rounded up to 16]."""
        return self.up_bias + 4 * STRIP_ROWS * self.intermediate_strips

    @property
    def payload_bytes(self) -> int:
        """Bytes that mean something: all of the record but its tail padding."""
        bias_end = self.down_bias + 4 * STRIP_ROWS * self.hidden_strips
        return bias_end if self.biased else self.gate_bias

    @property
    def record_bytes(self) -> int:
        """Size of the record, a multiple of 4096."""
        return ceil_div(self.payload_bytes, RECORD_ALIGNMENT) * RECORD_ALIGNMENT


def check_expert(layout: ExpertLayout, weights: ExpertWeights) -> None:
    """Refuses an expert whose matrices or biases do not fit the layout.

    Raises:
        FormatError: names the part, what was wanted and what is there.
    """
    hidden, intermediate = layout.hidden, layout.intermediate
    check_matrix(weights.gate, intermediate, hidden, "gate")
    check_matrix(weights.up, intermediate, hidden, "up")
    check_matrix(weights.down, hidden, intermediate, "down")
    sizes = {"gate_bias": intermediate, "up_bias": intermediate, "down_bias": hidden}
    for name, size in sizes.items():
        bias = getattr(weights, name)
        fits = bias is None or (bias.shape == (size,) and bias.dtype == np.float32)
        if (bias is not None) != layout.biased or not fits:
            there = "none" if bias is None else f"{bias.dtype} {list(bias.shape)}"
            wanted = f"float32 [{size}]" if layout.biased else "none"
            raise FormatError(
                f"{name}: {wanted} wanted, {there} found",
                hint="a geometry has all three biases, or none",
            )


def _check_record(layout: ExpertLayout, record: NDArray[np.uint8]) -> None:
    if record.shape != (layout.record_bytes,) or record.dtype != np.uint8:
        raise FormatError(
            f"an expert record is uint8 [{layout.record_bytes}], not "
            f"{record.dtype} {list(record.shape)}",
            hint="the layout and the buffer belong to different geometries",
        )


def write_expert(layout: ExpertLayout, weights: ExpertWeights, out: NDArray[np.uint8]) -> None:
    """Writes the record of one expert, padding included, into `out` u8 [record_bytes].

    Raises:
        FormatError: weights or buffer do not fit the layout.
    """
    check_expert(layout, weights)
    _check_record(layout, out)
    out[:] = 0
    gate_up = np.stack((pack_strips(weights.gate), pack_strips(weights.up)), axis=1)
    out[: layout.down_strip(0)] = gate_up.reshape(-1)
    out[layout.down_strip(0) : layout.gate_bias] = pack_strips(weights.down).reshape(-1)
    offsets = (layout.gate_bias, layout.up_bias, layout.down_bias)
    biases = (weights.gate_bias, weights.up_bias, weights.down_bias)
    for offset, bias in zip(offsets, biases, strict=True):
        if bias is not None:
            raw = bias.astype("<f4").view(np.uint8)
            out[offset : offset + raw.size] = raw


def _read_bias(record: NDArray[np.uint8], offset: int, count: int) -> NDArray[np.float32]:
    return record[offset : offset + 4 * count].copy().view("<f4").astype(np.float32)


def read_expert(layout: ExpertLayout, record: NDArray[np.uint8]) -> ExpertWeights:
    """The inverse of `write_expert`; the arrays are copies.

    Raises:
        FormatError: the record does not have the layout's size.
    """
    _check_record(layout, record)
    hidden, intermediate = layout.hidden, layout.intermediate
    gate_up = record[: layout.down_strip(0)].reshape(layout.intermediate_strips, 2, -1)
    down = record[layout.down_strip(0) : layout.gate_bias].reshape(layout.hidden_strips, -1)
    biases: dict[str, NDArray[np.float32]] = {}
    if layout.biased:
        biases["gate_bias"] = _read_bias(record, layout.gate_bias, intermediate)
        biases["up_bias"] = _read_bias(record, layout.up_bias, intermediate)
        biases["down_bias"] = _read_bias(record, layout.down_bias, hidden)
    return ExpertWeights(
        gate=unpack_strips(gate_up[:, 0], intermediate, hidden),
        up=unpack_strips(gate_up[:, 1], intermediate, hidden),
        down=unpack_strips(down, hidden, intermediate),
        **biases,
    )
