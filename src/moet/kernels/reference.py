"""docs/numerics.md in numpy: slow, obvious, and what every other kernel is compared with.

Shape letters: T tokens, H hidden, I intermediate, K slots a token, N rows, B blocks of 32.
The order of everything here that rounds is load-bearing; the integer dot is exact in any order.
Overflow: |d| <= 32 * 12 * 32639 = 12,533,376 < 2^24, so a float32 matmul of the integers is exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import KernelError
from moet.formats import mxfp4, mxint
from moet.formats.gate import GateKind
from moet.formats.mxfp4 import Mxfp4Matrix
from moet.formats.mxint import Quantised
from moet.formats.tiling import ExpertWeights, check_expert
from moet.kernels.rounding import (
    F32,
    bf16_bits,
    check_environment,
    fma32,
    round_output,
    widen_bf16,
)
from moet.kernels.spec import LayerSpec

__all__ = [
    "accumulate",
    "combine",
    "dot_blocks",
    "exp",
    "expert_rows",
    "finish_row",
    "fma32",
    "gate_value",
    "gates",
    "matmul",
    "moe_layer",
    "round_output",
]

SEGMENT_BLOCKS: Final = 16

# Tokens, and weights, worked on at a time: the temporaries then stay in the cache.
_CHUNK_TOKENS = 64
_CHUNK_WEIGHTS = 1 << 18

# Overflow, NaN and underflow are results here, not faults.
_ieee = np.errstate(all="ignore")

_MAGIC = np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer
_EXP_COEFFICIENTS = tuple(
    np.float32(float.fromhex(c))
    for c in (
        "0x1.6a515cp-10",
        "0x1.12397ep-7",
        "0x1.5558acp-5",
        "0x1.555492p-3",
        "0x1.fffffcp-2",
        "1.0",
        "1.0",
    )
)
_LOG2_E = np.float32(float.fromhex("0x1.715476p+0"))
_LN2_HIGH = np.float32(float.fromhex("0x1.62e43p-1"))
_LN2_LOW = np.float32(float.fromhex("0x1.05c61p-29"))
_GPT_OSS_ALPHA = np.float32(float.fromhex("0x1.b3b646p+0"))
_GELU_CUBIC = np.float32(float.fromhex("0x1.2444f2p-4"))
_GELU_LINEAR = np.float32(float.fromhex("0x1.988454p+0"))

# ---- sections 3 and 4: one matrix times quantised activations


def dot_blocks(codes: NDArray[np.uint8], q: NDArray[np.int32]) -> NDArray[np.int32]:
    """Exact integer dots of every row, token and block.

    Args:
        codes: packed codes u8 [N, K/2].
        q: int32 [T, B, 32], B = K/32.

    Returns:
        d: int32 [B, T, N] = sum over the block of w2 * q, w2 = twice the weight in scale units.
    """
    tokens, blocks, block = q.shape
    w2 = mxfp4.E2M1_X2[mxfp4.unpack_codes(codes)].reshape(-1, blocks, block)
    left = q.transpose(1, 0, 2).astype(np.float32)
    right = w2.transpose(1, 2, 0).astype(np.float32)
    d: NDArray[np.float32] = np.matmul(left, right)
    return d.reshape(blocks, tokens, -1).astype(np.int32)


@_ieee
def accumulate(d: NDArray[np.int32], scales: NDArray[np.uint8], sx: F32) -> F32:
    """Form T over blocks ascending, segments of 16 blocks added in order.

    Args:
        d: int32 [B, T, N].
        scales: weight scale bytes u8 [N, B], none of them 255.
        sx: fp32 [T, B]; NaN marks a poisoned block.

    Returns:
        tot: fp32 [T, N].
    """
    blocks = d.shape[0]
    sw = mxfp4.scale_values(scales)
    tot: F32 | None = None
    for start in range(0, blocks, SEGMENT_BLOCKS):
        acc = np.zeros(d.shape[1:], np.float32)
        for b in range(start, min(start + SEGMENT_BLOCKS, blocks)):
            t = d[b].astype(np.float32) * sx[:, b, None]
            acc = fma32(t, sw[:, b], acc)
        tot = acc if tot is None else tot + acc
    if tot is None:
        raise KernelError("a matrix without blocks", hint="K must be a positive multiple of 32")
    return tot


def matmul(matrix: Mxfp4Matrix, x: Quantised) -> F32:
    """tot [T, N] of a matrix [N, K] and quantised activations of T tokens (q [T, B, 32]).

    Raises:
        FormatError: a weight scale byte is 255, or the matrix does not have the activations' K.
    """
    tokens, blocks = x.be.shape
    rows = matrix.codes.shape[0]
    mxfp4.check_matrix(matrix, rows, blocks * mxfp4.BLOCK, "matrix")
    mxfp4.check_scales(matrix.scales, "matrix scales")
    tot = np.empty((tokens, rows), np.float32)
    step = max(16, _CHUNK_WEIGHTS // (blocks * mxfp4.BLOCK))
    for lo, first in itertools.product(range(0, rows, step), range(0, tokens, _CHUNK_TOKENS)):
        n, t = slice(lo, lo + step), slice(first, first + _CHUNK_TOKENS)
        d = dot_blocks(matrix.codes[n], x.q[t])
        tot[t, n] = accumulate(d, matrix.scales[n], x.sx[t])
    return tot


# ---- section 5: exp and the gates


@_ieee
def exp(x: F32) -> F32:
    """E of the contract: e^x within 0.9 ulp for |x| <= 87, clamped beyond. Not defined for NaN."""
    x = np.where(x > 87, np.float32(87), x)
    x = np.where(x < -87, np.float32(-87), x)
    z = fma32(x, _LOG2_E, _MAGIC)
    n = z - _MAGIC
    r = fma32(n, -_LN2_HIGH, x)
    r = fma32(n, _LN2_LOW, r)
    p = np.full_like(r, _EXP_COEFFICIENTS[0])
    for coefficient in _EXP_COEFFICIENTS[1:]:
        p = fma32(p, r, coefficient)
    bits = p.view(np.uint32) + (z.view(np.uint32) << np.uint32(23))
    return bits.view(np.float32)


def _logistic_times(a: F32, z: F32) -> F32:
    """RN(a / RN(1 + E(-z)))."""
    return a / (np.float32(1) + exp(-z))


@_ieee
def gate_value(kind: GateKind, g: F32) -> F32:
    """y: the gate's nonlinearity after the limit (without up), fp32, any shape."""
    floor = {GateKind.SILU: -87, GateKind.GPT_OSS: -51, GateKind.GELU_TANH: -9}[kind]
    a = np.where(g < floor, np.float32(floor), g)
    if kind is GateKind.SILU:
        return _logistic_times(a, a)
    if kind is GateKind.GPT_OSS:
        return _logistic_times(a, _GPT_OSS_ALPHA * a)
    c = fma32(a * a, _GELU_CUBIC, _GELU_LINEAR)
    return _logistic_times(a, c * a)


@_ieee
def gates(kind: GateKind, limit: float | None, g: F32, u: F32) -> F32:
    """h of section 5 from gate and up (biases already added); NaN passes every limit."""
    if limit is not None:
        top = np.float32(limit)
        g = np.where(g > top, top, g)
        u = np.where(u > top, top, np.where(u < -top, -top, u))
    y = gate_value(kind, g)
    if kind is GateKind.GPT_OSS:
        u = u + np.float32(1)
    h: F32 = y * u
    return h


# ---- section 6: rows and combine


@_ieee
def finish_row(tot: F32, bias: F32 | None, rows_bf16: bool) -> F32:
    """A row from its sums: optional bias, then RN to bf16 (widened again) where rows are bf16."""
    row = tot if bias is None else tot + bias
    return widen_bf16(bf16_bits(row)) if rows_bf16 else row


@_ieee
def combine(
    rows: F32, valid: NDArray[np.bool_], weights: F32, output_scale: float | None = None
) -> F32:
    """The weighted sum over slots, ascending, one fma a valid slot.

    Args:
        rows: fp32 [T, K, H]; rows of slots that are not valid are never looked at.
        valid: bool [T, K].
        weights: fp32 [T, K].
        output_scale: factor on the sum, or None.

    Returns:
        out: fp32 [T, H] before the rounding to the output type; +0 where no slot is valid.
    """
    tokens, slots, hidden = rows.shape
    out = np.zeros((tokens, hidden), np.float32)
    for slot in range(slots):
        on = np.flatnonzero(valid[:, slot])
        out[on] = fma32(rows[on, slot], weights[on, slot, None], out[on])
    return out if output_scale is None else np.float32(output_scale) * out


# ---- the layer


@_ieee
def expert_rows(spec: LayerSpec, expert: ExpertWeights, x: Quantised) -> F32:
    """Rows of one expert: fp32 [T, H] for activations q [T, B, 32]."""
    check_expert(spec.layout, expert)
    gate = matmul(expert.gate, x)
    up = matmul(expert.up, x)
    if expert.gate_bias is not None and expert.up_bias is not None:
        gate, up = gate + expert.gate_bias, up + expert.up_bias
    h = gates(spec.gate, spec.limit, gate, up)
    tot = matmul(expert.down, mxint.quantise(h, spec.act))
    return finish_row(tot, expert.down_bias, spec.rows_bf16)


def _check_call(spec: LayerSpec, x: F32, ids: NDArray[np.int32], weights: F32) -> None:
    tokens, slots = x.shape[0], min(ids.shape[-1], spec.top_k)
    wanted = {"x": (tokens, spec.hidden), "ids": (tokens, slots), "weights": ids.shape}
    for (name, shape), array in zip(wanted.items(), (x, ids, weights), strict=True):
        kind = np.int32 if name == "ids" else np.float32
        if array.shape != shape or array.dtype != kind:
            raise KernelError(
                f"{name}: {np.dtype(kind)} {list(shape)} wanted, "
                f"{array.dtype} {list(array.shape)} found",
                hint="x is [T, hidden], ids and weights are [T, K] with K <= top_k",
            )
    if ids.size and ids.max() >= spec.experts:
        raise KernelError(
            f"expert id {ids.max()} is outside 0..{spec.experts - 1}",
            hint="negative ids mark empty slots; all others must name an expert of the layer",
        )


def moe_layer(
    spec: LayerSpec,
    x: F32,
    ids: NDArray[np.int32],
    weights: F32,
    experts: Mapping[int, ExpertWeights],
) -> F32:
    """The routed experts of one layer.

    Args:
        spec: the layer.
        x: fp32 [T, H]; bf16 and fp16 inputs widened exactly.
        ids: int32 [T, K], K <= top_k; a negative id is an empty slot. Empty slots, and experts
            that are not in `experts` (another rank's), are skipped.
        weights: fp32 [T, K], the router's.
        experts: the experts that this rank owns.

    Returns:
        out: fp32 [T, H], to be stored by `round_output`.

    Raises:
        KernelError: shapes or types do not fit the spec, an id is E or more, or subnormals are
            flushed in this thread.
        FormatError: an expert does not fit the spec, or has a scale byte 255.
    """
    check_environment()
    _check_call(spec, x, ids, weights)
    quantised = mxint.quantise(x, spec.act)
    rows = np.zeros((*ids.shape, spec.hidden), np.float32)
    valid = np.zeros(ids.shape, np.bool_)
    for expert in sorted(set(ids.ravel().tolist()) & set(experts)):
        tokens, slots = np.nonzero(ids == expert)
        part = Quantised(quantised.q[tokens], quantised.be[tokens], spec.act)
        rows[tokens, slots] = expert_rows(spec, experts[expert], part)
        valid[tokens, slots] = True
    return combine(rows, valid, weights, spec.output_scale)
