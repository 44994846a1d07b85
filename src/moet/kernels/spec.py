"""What a MoE layer is to a kernel: shapes, formats and the gate. Data only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from moet.base.errors import KernelError
from moet.formats.gate import GateKind
from moet.formats.mxint import ActFormat
from moet.formats.tiling import ExpertLayout

__all__ = ["ActFormat", "DType", "GateKind", "LayerSpec"]


class DType(IntEnum):
    """Types of a layer's input and output. The values are those of csrc."""

    F32 = 0
    BF16 = 1
    F16 = 2

    @property
    def nbytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.F32 else 2


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """The routed experts of one MoE layer, as one rank computes them.

    Attributes:
        hidden: H, a multiple of 32.
        intermediate: I of this rank's slice, a multiple of 32.
        experts: E; valid ids are 0..E-1.
        top_k: K slots a token.
        act: format of the quantised activations, both of the layer's input and of h.
        gate: how gate and up become h.
        limit: clamp of gate (above) and up (both sides); None where the model has none.
        biased: the three matrices have biases.
        output_scale: factor on the combined output, where the router has not applied it already.

    Raises:
        FormatError: hidden or intermediate is not a multiple of 32.
        KernelError: any other value that no kernel has.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    act: ActFormat
    gate: GateKind = GateKind.SILU
    limit: float | None = None
    biased: bool = False
    output_scale: float | None = None

    def __post_init__(self) -> None:
        _ = self.layout
        if not 1 <= self.top_k <= self.experts:
            raise KernelError(
                f"top_k = {self.top_k} of {self.experts} experts",
                hint="top_k lies in 1..experts",
            )
        for name, value in (("limit", self.limit), ("output_scale", self.output_scale)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise KernelError(
                    f"{name} = {value}", hint="a positive finite number, or None for absent"
                )

    @property
    def layout(self) -> ExpertLayout:
        """Layout of one expert's record."""
        return ExpertLayout(self.hidden, self.intermediate, self.biased)

    @property
    def rows_bf16(self) -> bool:
        """Rows are rounded to bf16 before the combine (MXINT8); fp32 rows otherwise (MXINT16)."""
        return self.act is ActFormat.MXINT8
