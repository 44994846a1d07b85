"""Oracles for binary32: rational arithmetic, and the C library's own fma."""

from __future__ import annotations

import ctypes
import ctypes.util
import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def round_f32(x: Fraction) -> float:
    """RN of a rational that is not zero to binary32: subnormals kept, overflow to infinity."""
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    ulp = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(size / ulp) * ulp  # Fraction rounds halves to even
    magnitude = math.inf if rounded >= Fraction(2) ** 128 else float(rounded)
    return math.copysign(magnitude, x)


def fma_rational(a: float, b: float, c: float) -> float:
    """RN(a * b + c) of three binary32 numbers, by rational arithmetic."""
    in_double = a * b + c  # right wherever the exact result is zero, infinite or NaN
    if not all(math.isfinite(v) for v in (a, b, c)):
        return in_double
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return in_double if exact == 0 else round_f32(exact)


def fma_libm(a: F32, b: F32, c: F32) -> F32:
    """C's fmaf, elementwise on arrays of one shape [n]."""
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    triples = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    return np.array([fmaf(*triple) for triple in triples], np.float32)


def differing(a: F32, b: F32) -> NDArray[np.intp]:
    """Flat indices at which two fp32 arrays differ in their bits; two NaN are equal."""
    same = (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))
    return np.flatnonzero(~same)
