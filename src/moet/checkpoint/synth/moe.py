"""The MoE part that all families share: expert tensors by the name map, routers with a skew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moet.checkpoint.families import LAYOUTS
from moet.checkpoint.geometry import ModelGeometry
from moet.checkpoint.synth.draw import Draw, key_of, stored, to_bf16
from moet.checkpoint.synth.router import router_weights, zipf_shares
from moet.checkpoint.writer import TensorPlan
from moet.formats.mxfp4 import BLOCK, BLOCK_BYTES

EXPERT_GAIN = 1.5  # spread of expert weights over 1 / sqrt(K): the experts' share of the residual
_BIAS_STD = 0.1


@dataclass(frozen=True)
class Moe:
    """Draws the MoE layers of one model.

    Attributes:
        zipf: exponent of the law that the router's choices follow; 0 is uniform.
        code_dtype: safetensors dtype of expert codes, ``U8`` or ``I8``.
        scale_dtype: that of scale bytes, ``U8`` or ``F8_E8M0``.
    """

    draw: Draw
    geometry: ModelGeometry
    prefix: str
    zipf: float
    code_dtype: str = "U8"
    scale_dtype: str = "U8"

    def experts(self, layer: int) -> Iterator[TensorPlan]:
        """All expert tensors of a layer, in the order in which a checkpoint holds them."""
        layout = LAYOUTS[self.geometry.layout]
        if layout.fused:
            yield from self._fused(layer)
            return
        for expert in range(self.geometry.experts):
            for matrix in (layout.gate, layout.down, layout.up):
                yield from self._matrix(layer, expert, matrix)

    def router(self, name: str, layer: int) -> TensorPlan:
        """Router weights, bf16 [E, H of the model's stream]."""
        geometry = self.geometry
        weights = router_weights(
            geometry.hidden, geometry.experts, geometry.top_k, self.zipf, self._rng("router", layer)
        )
        return stored(name, "BF16", to_bf16(weights))

    def token_table(self, name: str, layer: int, vocab: int) -> TensorPlan:
        """Experts of each token where the layer routes by hash: int32 [V, top_k], same law.

        Weighted sampling without replacement by the k largest of log(share) + Gumbel noise
        (Vieira 2014): a share there is a weight, not an exact frequency.
        """
        geometry, rng = self.geometry, self._rng("table", layer)
        shares = zipf_shares(geometry.experts, geometry.top_k, self.zipf)
        log_weights = np.log(rng.permutation(shares)).astype(np.float32)
        table = np.empty((vocab, geometry.top_k), np.int32)
        for first in range(0, vocab, 4096):
            part = table[first : first + 4096]
            noise = rng.gumbel(size=(len(part), geometry.experts)).astype(np.float32)
            part[:] = np.argpartition(log_weights + noise, -geometry.top_k, axis=1)[
                :, -geometry.top_k :
            ]
        return stored(name, "I32", table)

    def _rng(self, what: str, layer: int) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64(key_of(self.draw.seed, f"{what}/{layer}")))

    def _shape(self, matrix: str) -> tuple[int, int]:
        hidden, inter = self.geometry.hidden, self.geometry.intermediate
        down = matrix == LAYOUTS[self.geometry.layout].down
        return (hidden, inter) if down else (inter, hidden)

    def _matrix(self, layer: int, expert: int, matrix: str) -> list[TensorPlan]:
        layout = LAYOUTS[self.geometry.layout]
        rows, k = self._shape(matrix)
        names = {"p": self.prefix, "i": layer, "e": expert, "m": matrix}
        codes, scales = layout.codes.format(**names), layout.scales.format(**names)
        shapes = (rows, k // 2), (rows, k // BLOCK)
        plans = self.draw.mxfp4(codes, (codes, scales), shapes, EXPERT_GAIN * k**-0.5)
        dtypes = (self.code_dtype, self.scale_dtype)
        return [
            TensorPlan(p.name, t, p.shape, p.source) for p, t in zip(plans, dtypes, strict=True)
        ]

    def _fused(self, layer: int) -> Iterator[TensorPlan]:
        layout, experts = LAYOUTS[self.geometry.layout], self.geometry.experts
        for matrix in (layout.gate, layout.down):
            rows, k = self._shape(matrix)
            rows *= 2 if matrix == layout.gate else 1
            names = {"p": self.prefix, "i": layer, "m": matrix}
            codes, scales = layout.codes.format(**names), layout.scales.format(**names)
            shapes = (experts, rows, k // BLOCK, BLOCK_BYTES), (experts, rows, k // BLOCK)
            yield from self.draw.mxfp4(codes, (codes, scales), shapes, EXPERT_GAIN * k**-0.5)
            bias = layout.bias.format(**names)
            yield self.draw.gaussian(bias, (experts, rows), _BIAS_STD)


def norm(name: str, width: int) -> TensorPlan:
    """RMSNorm weights: ones."""
    ones: NDArray[np.float32] = np.ones(width, np.float32)
    return stored(name, "BF16", to_bf16(ones))
