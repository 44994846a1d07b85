"""The activation formats that the error tables compare, each as a function x -> dequantised x.

All take and give fp64 [..., K]; what they are given is rounded to fp32 first. Blocks lie along K;
a ragged last block is filled with zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moet.formats import mxint
from moet.formats.mxint import ActFormat
from moet.kernels.rounding import bf16_bits, widen_bf16

F64 = NDArray[np.float64]
E4M3_MAX = 448.0


def round_e4m3(x: F64) -> F64:
    """Nearest E4M3 value, ties to even, saturating at 448; subnormals down to 2^-9."""
    exponent = np.maximum(np.frexp(x)[1] - 1, -6)
    step = np.ldexp(1.0, exponent - 3)
    return np.clip(np.rint(x / step) * step, -E4M3_MAX, E4M3_MAX)


def _blocks(x: F64, size: int) -> F64:
    missing = -x.shape[-1] % size
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return padded.reshape(*x.shape[:-1], padded.shape[-1] // size, size)


def _in_blocks(x: F64, size: int, convert: Callable[[F64, F64], F64]) -> F64:
    """convert(blocks, largest magnitude of each, at least 2^-126), undone to the shape of x."""
    blocks = _blocks(x.astype(np.float32).astype(np.float64), size)
    amax = np.maximum(np.abs(blocks).max(axis=-1, keepdims=True), 2.0**-126)
    flat = convert(blocks, amax).reshape(*x.shape[:-1], -1)
    return flat[..., : x.shape[-1]]


def _mxfp8_floor(blocks: F64, amax: F64) -> F64:
    scale = np.ldexp(1.0, np.frexp(amax)[1] - 1 - 8)
    return round_e4m3(blocks / scale) * scale


def _mxfp8_ceil(blocks: F64, amax: F64) -> F64:
    fraction, exponent = np.frexp(amax / E4M3_MAX)
    scale = np.ldexp(1.0, np.where(fraction == 0.5, exponent - 1, exponent))
    return round_e4m3(blocks / scale) * scale


def _fp8(blocks: F64, amax: F64) -> F64:
    scale = amax / E4M3_MAX
    return round_e4m3(blocks / scale) * scale


def _int8(blocks: F64, amax: F64) -> F64:
    scale = amax / 127
    return np.rint(blocks / scale) * scale


def _mxint(x: F64, act: ActFormat) -> F64:
    values = mxint.quantise(x.astype(np.float32), act).values()
    return values.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]].astype(np.float64)


FORMATS: dict[str, Callable[[F64], F64]] = {
    "MXINT8": lambda x: _mxint(x, ActFormat.MXINT8),
    "MXFP8 ceil": lambda x: _in_blocks(x, 32, _mxfp8_ceil),
    "MXFP8 floor": lambda x: _in_blocks(x, 32, _mxfp8_floor),
    "FP8/128": lambda x: _in_blocks(x, 128, _fp8),
    "INT8/128": lambda x: _in_blocks(x, 128, _int8),
    "MXINT16": lambda x: _mxint(x, ActFormat.MXINT16),
    "bf16": lambda x: widen_bf16(bf16_bits(x.astype(np.float32))).astype(np.float64),
}
"""MXFP8 "ceil": the smallest power of two that does not saturate; "floor": OCP's rule."""
