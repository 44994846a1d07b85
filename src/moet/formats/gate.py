"""The gated activations: a fact of a checkpoint's family that the kernels must know."""

from __future__ import annotations

from enum import IntEnum


class GateKind(IntEnum):
    """How gate and up become h (docs/numerics.md, section 5). The values are those of csrc."""

    SILU = 0
    GPT_OSS = 1
    GELU_TANH = 2
