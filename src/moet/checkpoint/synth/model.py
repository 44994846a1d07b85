"""A random-weight model of a config: on disk in its real layout, or in memory expert by expert.

The same seed gives the same bytes in both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import UsageError
from moet.checkpoint.experts import ExpertIndex, MatrixSpans, Span
from moet.checkpoint.families import ARCHITECTURES, LAYOUTS
from moet.checkpoint.faults import BrokenCheckpoint, Fault
from moet.checkpoint.geometry import CONFIG, ModelGeometry, read_geometry
from moet.checkpoint.header import TensorInfo
from moet.checkpoint.open import refuse_ragged
from moet.checkpoint.synth import bare, deepseek_v4, gpt_oss, qwen3_moe
from moet.checkpoint.synth.cut import text_part
from moet.checkpoint.synth.draw import Draw
from moet.checkpoint.synth.moe import Moe
from moet.checkpoint.writer import SHARD_BYTES, U8, TensorPlan, write_checkpoint
from moet.formats.mxfp4 import Mxfp4Matrix
from moet.formats.tiling import ExpertWeights

COMPLETE = {"qwen3_moe": qwen3_moe, "gpt_oss": gpt_oss, "deepseek_v4": deepseek_v4}
"""Architectures of which every tensor is written; of the others routers and experts are."""

_MAX_ZIPF = 4


class SynthModel:
    """A model with random weights.

    Args:
        config: of config.json, cut as wanted (``cut.cut_config``).
        seed: what is drawn.
        zipf: exponent of the law that routers follow; 0: every expert alike.

    Raises:
        BrokenCheckpoint: the config is not usable.
        UsageError: zipf is not in 0..4.
    """

    def __init__(self, config: dict[str, Any], *, seed: int = 0, zipf: float = 0.0) -> None:
        if not 0 <= zipf <= _MAX_ZIPF:
            hint = "0 is no skew, 1 a strong one; real routers are below 2"
            raise UsageError(f"a Zipf exponent of {zipf}; it lies in 0..{_MAX_ZIPF}", hint=hint)
        self.config = config
        self.geometry: ModelGeometry = read_geometry(config, Path(CONFIG))
        refuse_ragged(self.geometry, Path(CONFIG))
        nested = ARCHITECTURES[self.geometry.architecture].nested
        layout = LAYOUTS[self.geometry.layout]
        prefixes = [p for p in layout.prefixes if p.startswith("language_model.")] if nested else []
        deepseek = self.geometry.layout == "deepseek"
        moe = Moe(
            Draw(seed),
            self.geometry,
            prefixes[0] if prefixes else layout.prefixes[0],
            zipf,
            code_dtype="I8" if deepseek else "U8",
            scale_dtype="F8_E8M0" if deepseek else "U8",
        )
        self.plans: dict[str, TensorPlan] = _plans(config, moe)
        self._experts = ExpertIndex(self.geometry, self._as_tensors(), Path("memory"))

    @property
    def complete(self) -> bool:
        """Whether every tensor of the model is there, or routers and experts only."""
        return self.geometry.architecture in COMPLETE

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(plan.nbytes for plan in self.plans.values())

    def tensor(self, name: str) -> U8:
        """The bytes of one tensor, u8 [nbytes]."""
        plan = self.plans[name]
        out = np.empty(plan.nbytes, np.uint8)
        plan.source.fill(out, 0)
        return out

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """One routed expert."""
        spans = self._experts.find(layer, expert)
        gate, up, down = (self._matrix(m) for m in spans.matrices)
        biases = (self._bias(m.bias) if m.bias else None for m in spans.matrices)
        return ExpertWeights(gate, up, down, *biases)

    def write(
        self,
        folder: Path,
        *,
        shard_bytes: int = SHARD_BYTES,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Writes the checkpoint folder; see ``writer.write_checkpoint``."""
        plans = list(self.plans.values())
        write_checkpoint(folder, self.config, plans, shard_bytes=shard_bytes, progress=progress)

    def _as_tensors(self) -> dict[str, TensorInfo]:
        """The plans as if each were a file of its own: spans then count from the tensor's start."""
        return {
            p.name: TensorInfo(p.name, Path(p.name), p.dtype, p.shape, 0, p.nbytes)
            for p in self.plans.values()
        }

    def _rows(self, span: Span) -> U8:
        """The rows of a span, u8 [rows, row_bytes]."""
        base = span.offset - span.offset % span.step
        whole = np.empty(span.rows * span.step, np.uint8)
        self.plans[span.tensor].source.fill(whole, base)
        first = span.offset - base
        rows = whole.reshape(span.rows, span.step)[:, first : first + span.row_bytes]
        return np.ascontiguousarray(rows)

    def _matrix(self, spans: MatrixSpans) -> Mxfp4Matrix:
        return Mxfp4Matrix(self._rows(spans.codes), self._rows(spans.scales))

    def _bias(self, span: Span) -> NDArray[np.float32]:
        words = self._rows(span).view("<u2").reshape(-1).astype(np.uint32)
        return (words << np.uint32(16)).view(np.float32)


def _plans(config: dict[str, Any], moe: Moe) -> dict[str, TensorPlan]:
    """All tensors by name.

    Raises:
        BrokenCheckpoint: BAD_CONFIG, a number that the other tensors need is missing or odd.
    """
    family = COMPLETE.get(moe.geometry.architecture, bare)
    try:
        plans = {plan.name: plan for plan in family.plans(text_part(config), moe)}
    except KeyError as error:
        what = f"{error.args[0]} is missing"
        raise BrokenCheckpoint(Fault.BAD_CONFIG, CONFIG, what) from error
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        what = f"a number in it is odd: {error}"
        raise BrokenCheckpoint(Fault.BAD_CONFIG, CONFIG, what) from error
    for plan in plans.values():
        if not all(isinstance(size, int) and size > 0 for size in plan.shape):
            what = f"{plan.name} would have the shape {list(plan.shape)!r:.80}"
            raise BrokenCheckpoint(Fault.BAD_CONFIG, CONFIG, what)
    return plans
