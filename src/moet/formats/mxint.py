"""MXINT8 and MXINT16 activations: blocks of 32 integers that share a power of two.

The quantiser of docs/numerics.md, section 1, where the bounds are proven. An element is
q * 2^(be-unit); a block that cannot be represented (NaN, infinity, too large) is *poisoned*:
be = 255, q = 0, scale NaN.

Integer arithmetic on the bits is load-bearing: a float max would lose NaN. be is computed unsigned
(the sum can pass 2^31), and the clamp to `floor` comes before the comparison with `CEILING`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

BLOCK: Final = 32
"""Activations that share one exponent."""

CEILING: Final = 238
"""Largest `be` of a block that is not poisoned, in both formats."""

POISON: Final = 255
"""The `be` of a poisoned block."""


class ActFormat(IntEnum):
    """How activations are quantised; the value is the number of bits of an element."""

    MXINT8 = 8
    MXINT16 = 16

    @property
    def q_max(self) -> int:
        """Largest |q|: 127, or 127 * 256 + 127 (two signed 8-bit slices)."""
        return 127 if self is ActFormat.MXINT8 else 32639

    @property
    def unit(self) -> int:
        """An element is q * 2^(be - unit)."""
        return 133 if self is ActFormat.MXINT8 else 141

    @property
    def carry(self) -> int:
        """Added to the bits of the block's largest magnitude: carries when q would pass q_max."""
        return 0x1FFFF if self is ActFormat.MXINT8 else 0x101FF

    @property
    def floor(self) -> int:
        """Smallest `be`: the one whose scale 2^(be - unit - 1) is the smallest normal number."""
        return self.unit + 1 - 126


@dataclass(frozen=True)
class Quantised:
    """Quantised activations.

    Attributes:
        q: int32 [..., B, 32], |q| <= act.q_max.
        be: uint8 [..., B], act.floor..CEILING, or POISON.
        act: the format.
    """

    q: NDArray[np.int32]
    be: NDArray[np.uint8]
    act: ActFormat

    @property
    def sx(self) -> NDArray[np.float32]:
        """fp32 [..., B]: 2^(be - unit - 1), half an element unit (weights count in halves).

        NaN where the block is poisoned.
        """
        exponent = self.be.astype(np.int32) - self.act.unit - 1
        scale = np.ldexp(np.float32(1), np.where(self.be == POISON, 0, exponent))
        return np.where(self.be == POISON, np.float32(np.nan), scale).astype(np.float32)

    def slices(self) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
        """(hi, lo) int8 [..., B, 32] with q = 256 * hi + lo; hi is 0 in MXINT8."""
        hi = (self.q + 128) >> 8 if self.act is ActFormat.MXINT16 else np.zeros_like(self.q)
        return hi.astype(np.int8), (self.q - 256 * hi).astype(np.int8)

    def values(self) -> NDArray[np.float32]:
        """What the elements stand for: fp32 [..., B, 32], exact; NaN in poisoned blocks."""
        doubled: NDArray[np.float32] = self.q.astype(np.float32) * self.sx[..., None]
        return doubled * np.float32(2)


def blocks_of(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """fp32 [..., K] -> [..., ceil(K/32), 32]; missing elements of the last block are +0."""
    missing = -x.shape[-1] % BLOCK
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return padded.reshape(*x.shape[:-1], padded.shape[-1] // BLOCK, BLOCK)


def block_exponents(x: NDArray[np.float32], act: ActFormat) -> NDArray[np.uint8]:
    """`be` of every block: fp32 [..., B, 32] -> uint8 [..., B]."""
    magnitudes = np.ascontiguousarray(x).view(np.uint32) & np.uint32(0x7FFFFFFF)
    am = magnitudes.max(axis=-1).astype(np.int64)
    be = np.maximum((am + act.carry) >> 23, act.floor)
    return np.where(be > CEILING, POISON, be).astype(np.uint8)


def quantise(x: NDArray[np.float32], act: ActFormat) -> Quantised:
    """fp32 [..., K] -> Quantised with B = ceil(K/32) blocks. Never fails: bad blocks are poisoned.

    Args:
        x: activations; bf16 and fp16 ones widened exactly.
        act: the format.
    """
    blocks = blocks_of(np.asarray(x, dtype=np.float32))
    be = block_exponents(blocks, act)
    poisoned = (be == POISON)[..., None]
    clean = np.where(poisoned, np.float32(0), blocks)
    inv = np.ldexp(np.float32(1), act.unit - np.where(be == POISON, act.unit, be).astype(np.int32))
    q = np.rint(clean * inv[..., None]).astype(np.int32)
    return Quantised(q, be, act)
