"""Random MoE layers and calls of them, for the exams of the kernels. A seed gives the same case."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moet.formats.mxfp4 import Mxfp4Matrix
from moet.formats.tiling import ExpertWeights, write_expert
from moet.kernels.cpu import CpuLayer, Pool
from moet.kernels.rounding import widen_bf16
from moet.kernels.spec import DType, LayerSpec

PLAIN_SCALES = (118, 127)
"""Scale bytes as trained models have them: weights of 2^-9 to 2^-1."""

WILD_SCALES = (0, 255)
"""Every scale byte that is allowed (0..254)."""


def random_matrix(
    rng: np.random.Generator, rows: int, k: int, scales: tuple[int, int]
) -> Mxfp4Matrix:
    """Random codes and scale bytes, [rows, k]."""
    codes = rng.integers(0, 256, (rows, k // 2), np.uint8)
    return Mxfp4Matrix(codes, rng.integers(*scales, (rows, k // 32), np.uint8))


def random_expert(
    rng: np.random.Generator, spec: LayerSpec, scales: tuple[int, int] = PLAIN_SCALES
) -> ExpertWeights:
    """One expert of a layer, with biases where the layer has them."""
    hidden, intermediate = spec.hidden, spec.intermediate
    biases: list[NDArray[np.float32]] = []
    if spec.biased:
        sizes = (intermediate, intermediate, hidden)
        biases = [rng.standard_normal(n).astype(np.float32) for n in sizes]
    return ExpertWeights(
        random_matrix(rng, intermediate, hidden, scales),
        random_matrix(rng, intermediate, hidden, scales),
        random_matrix(rng, hidden, intermediate, scales),
        *biases,
    )


def random_x(
    rng: np.random.Generator, tokens: int, hidden: int, x_type: DType, wild: bool = False
) -> NDArray[Any]:
    """Activations [T, H] of a type: float32, float16, or uint16 holding bf16.

    Wild ones span the whole range of exponents and hold zeros of both signs, subnormals, infinities
    and NaN: whole tokens are poisoned by them, others are not.
    """
    shape = (tokens, hidden)
    x = rng.standard_normal(shape).astype(np.float32)
    x *= np.exp2(rng.integers(-6, 4, (tokens, hidden // 32, 1))).repeat(32, 2).reshape(shape)
    if wild:
        x *= np.exp2(rng.integers(-140, 120, (tokens, 1)))
        odd = np.array([0.0, -0.0, 1e-40, -1e-44, np.inf, np.nan], np.float32)
        limits = rng.integers(0, len(odd) + 1, (tokens, 1))
        picked = odd[(rng.integers(0, len(odd), shape) % np.maximum(limits, 1))]
        x = np.where((rng.random(shape) < 0.02) & (limits > 0), picked, x)
    x = x.astype(np.float32)
    if x_type is DType.F32:
        return x
    if x_type is DType.F16:
        with np.errstate(over="ignore", under="ignore"):
            return x.astype(np.float16)
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def widened(x: NDArray[Any]) -> NDArray[np.float32]:
    """The exact fp32 values of `random_x`'s output."""
    return widen_bf16(x) if x.dtype == np.uint16 else x.astype(np.float32)


def aligned_bytes(count: int) -> NDArray[np.uint8]:
    """Page-aligned zero bytes."""
    return np.frombuffer(mmap.mmap(-1, max(count, 1)), np.uint8)[:count]


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """A layer with its experts, as weights and as records.

    Attributes:
        spec: the layer.
        experts: what the reference takes.
        records: uint8 [E, record_bytes], page-aligned: what the kernels take.
    """

    spec: LayerSpec
    experts: dict[int, ExpertWeights]
    records: NDArray[np.uint8]

    @classmethod
    def random(
        cls, rng: np.random.Generator, spec: LayerSpec, scales: tuple[int, int] = PLAIN_SCALES
    ) -> LayerCase:
        """A case with random experts."""
        experts = {e: random_expert(rng, spec, scales) for e in range(spec.experts)}
        size = spec.layout.record_bytes
        records = aligned_bytes(spec.experts * size).reshape(spec.experts, size)
        for e, weights in experts.items():
            write_expert(spec.layout, weights, records[e])
        return cls(spec=spec, experts=experts, records=records)

    def layer(self, pool: Pool, isa: str = "", max_tokens: int = 64) -> CpuLayer:
        """A planned layer with every expert bound. The case must outlive it."""
        layer = CpuLayer(self.spec, pool, isa, max_tokens)
        for e in range(self.spec.experts):
            layer.bind(e, self.records[e].ctypes.data)
        return layer


def random_routing(
    rng: np.random.Generator, tokens: int, spec: LayerSpec, empty: float = 0.1
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """(ids [T, K], weights [T, K]): duplicates allowed, a share of the slots empty (-1)."""
    shape = (tokens, spec.top_k)
    ids = rng.integers(0, spec.experts, shape, np.int32)
    ids[rng.random(shape) < empty] = -1
    return ids, rng.standard_normal(shape).astype(np.float32)
