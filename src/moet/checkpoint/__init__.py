"""Where a checkpoint's bytes are: safetensors headers, family name maps, expert byte ranges."""

from moet.checkpoint.experts import ExpertTensors, MatrixSpans, Span
from moet.checkpoint.families import ExpertFormat
from moet.checkpoint.faults import BrokenCheckpoint, Fault
from moet.checkpoint.geometry import ModelGeometry
from moet.checkpoint.open import Checkpoint, open_checkpoint, refuse_gguf

__all__ = [
    "BrokenCheckpoint",
    "Checkpoint",
    "ExpertFormat",
    "ExpertTensors",
    "Fault",
    "MatrixSpans",
    "ModelGeometry",
    "Span",
    "open_checkpoint",
    "refuse_gguf",
]
