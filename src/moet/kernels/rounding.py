"""Roundings that numpy lacks: the binary32 fma, and the stores to bf16, fp16 and fp32.

Everything here is exact by construction and slow on purpose. Subnormals are kept; a NaN is stored
as the one canonical NaN of its type (docs/numerics.md, section 0).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import KernelError
from moet.kernels.spec import DType

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

CANONICAL_NAN: Final = {DType.F32: 0x7FFFFFFF, DType.BF16: 0x7FFF, DType.F16: 0x7FFF}
"""The stored NaN of each type."""

# Between two neighbouring fp32 numbers (normal range), the fp64 number half-way has these low bits.
_LOW_BITS = np.uint64(0x1FFFFFFF)
_HALF_WAY = np.uint64(0x10000000)
_SMALLEST_NORMAL = np.float32(2.0**-126)


def check_environment() -> None:
    """Refuses a thread in which subnormal numbers are flushed.

    Raises:
        KernelError: FTZ or DAZ is on (a library has set it).
    """
    halved = np.full(1, _SMALLEST_NORMAL) * np.float32(0.5)
    if not (halved * np.float32(2) == _SMALLEST_NORMAL).all():
        raise KernelError(
            "this thread flushes subnormal numbers to zero",
            hint="a library was built with fast-math and has set FTZ/DAZ; run moet without it",
        )


def _round_to_odd(product: F64, addend: F64, total: F64) -> F64:
    """RN64(product + addend) -> the exact sum rounded to odd at 53 bits.

    Knuth's two-sum gives the error of `total` exactly. Where it is not zero, the exact sum lies
    between `total` and a neighbour; of those two the one with an odd last bit is taken.
    """
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(np.int64)
    moves = (error != 0) & np.isfinite(total) & ((bits & 1) == 0)
    away_from_zero = (error > 0) == (total > 0)
    odd: NDArray[np.int64] = bits + moves * np.where(away_from_zero, 1, -1)
    return odd.view(np.float64)


def fma32(a: F32, b: F32 | np.float32, c: F32 | np.float32) -> F32:
    """RN32(a * b + c) with one rounding, elementwise with broadcasting; all arguments fp32.

    In fp64 the product is exact (48 bits) and the sum is rounded once. Rounding that again to fp32
    is wrong only where the fp64 sum fell on the middle between two fp32 numbers without being
    exact. Those places, and all of the subnormal range, are redone: rounding to odd first makes the
    second rounding right, because 53 >= 24 + 2.
    """
    with np.errstate(all="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        addend = np.broadcast_to(np.asarray(c, np.float64), product.shape)
        total = product + addend
        result: F32 = total.astype(np.float32)
        doubtful = (total.view(np.uint64) & _LOW_BITS) == _HALF_WAY
        doubtful |= np.abs(total) < _SMALLEST_NORMAL
        if doubtful.any():
            odd = _round_to_odd(product[doubtful], addend[doubtful], total[doubtful])
            result[doubtful] = odd.astype(np.float32)
    return result


def bf16_bits(x: F32) -> NDArray[np.uint16]:
    """RN to bf16, as bits. Overflow gives infinity, NaN gives 0x7FFF, subnormals are kept."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    to_even = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + to_even) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(CANONICAL_NAN[DType.BF16]), rounded)


def widen_bf16(bits: NDArray[np.uint16]) -> F32:
    """bf16 bits -> fp32, exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_output(out: F32, dtype: DType) -> NDArray[Any]:
    """The stored bits of an output: uint32 for fp32, uint16 for bf16 and fp16; same shape.

    One RN; overflow gives infinity; every NaN is the canonical one.
    """
    if dtype is DType.BF16:
        return bf16_bits(out)
    if dtype is DType.F16:
        with np.errstate(over="ignore", under="ignore"):
            half = out.astype(np.float16).view(np.uint16)
        return np.where(np.isnan(out), np.uint16(CANONICAL_NAN[dtype]), half)
    bits = np.ascontiguousarray(out).view(np.uint32)
    return np.where(np.isnan(out), np.uint32(CANONICAL_NAN[dtype]), bits)
