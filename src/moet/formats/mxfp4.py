"""MXFP4 weights: E2M1 codes, two a byte, and one E8M0 scale byte per 32 along K.

A code is a sign bit and a magnitude index into {0, 0.5, 1, 1.5, 2, 3, 4, 6}. The low nibble holds
the even k. A scale byte b stands for 2^(b-127); b = 0 stands for zero and b = 255 is refused
(docs/numerics.md, section 2). Shape letters: N rows, K columns, B = K/32 blocks.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import FormatError

BLOCK: Final = 32
"""Weights that share one scale byte."""

BLOCK_BYTES: Final = BLOCK // 2
"""Code bytes of one row of one block."""

SCALE_NAN: Final = 255
"""The E8M0 byte that is not a number: no weight may carry it."""

_MAGNITUDES_X2 = (0, 1, 2, 3, 4, 6, 8, 12)

E2M1_X2: Final[NDArray[np.int8]] = np.array(
    [*_MAGNITUDES_X2, *(-m for m in _MAGNITUDES_X2)], dtype=np.int8
)
"""Twice the value of each code, as int8[16]: what the integer dot multiplies with."""

_VALUES = np.array(
    [*(m / 2 for m in _MAGNITUDES_X2), *(-(m / 2) for m in _MAGNITUDES_X2)], dtype=np.float32
)

# Largest scale byte that quantise writes: 6 * 2^(252-127) is the last finite product.
_MAX_QUANTISED_SCALE = 252


class Mxfp4Matrix(NamedTuple):
    """One weight matrix as a checkpoint holds it.

    Attributes:
        codes: u8 [N, K/2], low nibble = even k.
        scales: u8 [N, K/32].
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]


def unpack_codes(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """u8 [..., K/2] -> u8 [..., K], one code (0..15) a byte."""
    nibbles = np.stack((packed & 15, packed >> 4), axis=-1)
    return nibbles.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def pack_codes(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """u8 [..., K] of codes 0..15 -> u8 [..., K/2]; K is even.

    Raises:
        FormatError: K is odd, or a value is not a code.
    """
    if codes.shape[-1] % 2:
        raise FormatError(
            f"K = {codes.shape[-1]} codes cannot be packed two a byte", hint="K must be even"
        )
    if codes.size and codes.max() > 15:
        raise FormatError(f"{codes.max()} is not an E2M1 code", hint="codes are 0..15")
    packed: NDArray[np.uint8] = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return packed


def check_scales(scales: NDArray[np.uint8], tensor_name: str) -> None:
    """Refuses the scale byte 255 (E8M0's NaN).

    Raises:
        FormatError: names the tensor and the index of the first such byte.
    """
    if not (scales == SCALE_NAN).any():
        return
    index = np.unravel_index(int(np.argmax(scales == SCALE_NAN)), scales.shape)
    where = ", ".join(str(int(i)) for i in index)
    raise FormatError(
        f"{tensor_name}[{where}] is the scale byte 255 (NaN)",
        hint="the file is damaged or is not MXFP4; download it again and compare checksums",
    )


def check_matrix(matrix: Mxfp4Matrix, rows: int, columns: int, name: str) -> None:
    """Refuses a matrix [N, K] whose arrays do not have the shapes and types of the format.

    Raises:
        FormatError: names the matrix, what was wanted and what is there.
    """
    wanted = ((rows, columns // 2), (rows, columns // BLOCK))
    for part, array, shape in zip(("codes", "scales"), matrix, wanted, strict=True):
        if array.shape != shape or array.dtype != np.uint8:
            raise FormatError(
                f"{name} {part}: uint8 {list(shape)} wanted, {array.dtype} {list(array.shape)} "
                "found",
                hint="codes are [N, K/2] and scales [N, K/32], both uint8",
            )


def scale_values(scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """sw of each scale byte, fp32, same shape: 2^(b-127), and +0 for b = 0; 255 is not allowed."""
    return (scales.astype(np.uint32) << np.uint32(23)).view(np.float32)


def dequantise(packed: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """codes u8 [..., K/2], scales u8 [..., K/32] -> fp32 [..., K].

    Exact (code 8 gives -0), except that a value past the fp32 range (scale bytes 253, 254 only)
    becomes infinite.
    """
    blocks = _VALUES[unpack_codes(packed)].reshape(*scales.shape, BLOCK)
    with np.errstate(over="ignore"):
        values: NDArray[np.float32] = blocks * scale_values(scales)[..., None]
    return values.reshape(*scales.shape[:-1], scales.shape[-1] * BLOCK)


def _block_scales(blocks: NDArray[np.float32]) -> NDArray[np.uint8]:
    """fp32 [..., B, 32] -> scale bytes [..., B] in 1..252 (rule in `quantise`)."""
    peak = np.abs(blocks).max(axis=-1).view(np.uint32).astype(np.int64)
    exponent: NDArray[np.int64] = ((peak + (1 << 21)) >> 23) - 2
    return np.clip(exponent, 1, _MAX_QUANTISED_SCALE).astype(np.uint8)


def _nearest_codes(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Nearest E2M1 code of each value, ties to the even code, magnitudes clipped to 6."""
    magnitude = np.minimum(np.abs(x), np.float32(6))
    step = np.where(magnitude < 2, 0.5, np.where(magnitude < 4, 1.0, 2.0))
    rounded_x2 = 2 * np.rint(magnitude / step) * step
    index = np.searchsorted(np.array(_MAGNITUDES_X2), rounded_x2).astype(np.uint8)
    sign = np.signbit(x).astype(np.uint8) << np.uint8(3)
    codes: NDArray[np.uint8] = index | sign
    return codes


def quantise(w: NDArray[np.float32]) -> Mxfp4Matrix:
    """fp32 [N, K] -> MXFP4, K a multiple of 32.

    The scale byte of a block follows from its largest magnitude m: the biased exponent of m plus a
    quarter of m's own binade, minus 2, kept in 1..252. So m / 2^(b-127) lies in [3.5, 7), only
    what exceeds 6 is clipped, and the code of m is 4 or 6: quantising the dequantised matrix gives
    the same bytes again.

    Raises:
        FormatError: K is not a multiple of 32, or a weight is not finite.
    """
    if w.shape[-1] % BLOCK:
        raise FormatError(
            f"K = {w.shape[-1]} is not a multiple of 32", hint="MXFP4 has whole blocks of 32"
        )
    if not np.isfinite(w).all():
        raise FormatError("a weight is NaN or infinite", hint="MXFP4 stores finite weights only")
    shape = (*w.shape[:-1], w.shape[-1] // BLOCK, BLOCK)
    blocks: NDArray[np.float32] = np.ascontiguousarray(w, dtype=np.float32).reshape(shape)
    scales = _block_scales(blocks)
    scaled: NDArray[np.float32] = blocks / scale_values(scales)[..., None]
    codes = _nearest_codes(scaled)
    return Mxfp4Matrix(pack_codes(codes.reshape(w.shape)), scales)
