"""From (layer, expert) to byte ranges: the tensors of routed experts, found, checked, cut.

A ``Span`` is a matrix of bytes inside a file, row n at ``offset + n * step``; in a fused tensor of
gate and up (gpt-oss) their rows alternate, so ``step`` is two rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moet.checkpoint.families import LAYOUTS, Layout
from moet.checkpoint.faults import BrokenCheckpoint, Fault
from moet.checkpoint.geometry import ModelGeometry
from moet.checkpoint.header import TensorInfo
from moet.formats.mxfp4 import BLOCK

_BYTES = ("U8", "I8")
_SCALES = ("U8", "I8", "F8_E8M0")


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of bytes in a file.

    Attributes:
        tensor: name, for messages.
        offset: of row 0, from the start of the file.
        rows: how many.
        row_bytes: bytes of one row.
        step: from one row to the next; ``row_bytes`` where rows are adjacent.
    """

    file: Path
    tensor: str
    offset: int
    rows: int
    row_bytes: int
    step: int

    @property
    def nbytes(self) -> int:
        """Bytes that mean something: rows * row_bytes."""
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class MatrixSpans:
    """One matrix [N, K]: codes of K / 2 bytes a row, scales of K / 32, bias of 2 (bf16) or None."""

    codes: Span
    scales: Span
    bias: Span | None


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """One routed expert: gate [I, H], up [I, H], down [H, I]."""

    gate: MatrixSpans
    up: MatrixSpans
    down: MatrixSpans

    @property
    def matrices(self) -> tuple[MatrixSpans, MatrixSpans, MatrixSpans]:
        """gate, up, down."""
        return self.gate, self.up, self.down

    @property
    def nbytes(self) -> int:
        """Bytes of the expert in the checkpoint."""
        return sum(
            span.nbytes for m in self.matrices for span in (m.codes, m.scales, m.bias) if span
        )


def name_pattern(layout: Layout) -> re.Pattern[str]:
    """Matches the names of routed expert tensors; groups i and, where not fused, e."""
    prefix = "|".join(re.escape(p) for p in layout.prefixes)
    matrix = "|".join(sorted({layout.gate, layout.up, layout.down}))
    parts = {"{p}": f"(?:{prefix})", "{m}": f"(?:{matrix})"}
    number = r"0|[1-9][0-9]{0,8}"  # longer ones are no layer's, and int() refuses very long ones
    parts |= {"{i}": f"(?P<i>{number})", "{e}": f"(?P<e>{number})"}

    def regex(template: str) -> str:
        text = re.escape(template).replace(r"\{", "{").replace(r"\}", "}")
        for placeholder, expression in parts.items():
            text = text.replace(placeholder, expression)
        return text

    names = [t for t in (layout.codes, layout.scales, layout.bias) if t]
    # Python allows a group name once: the alternatives share the part before the last dot or _.
    bodies = [regex(name) for name in names]
    head = _common_head(bodies)
    tails = "|".join(body[len(head) :] for body in bodies)
    return re.compile(f"{head}(?:{tails})")


def _common_head(texts: list[str]) -> str:
    """The longest common beginning that ends at the {m} group's closing parenthesis."""
    cut = texts[0].rindex(")") + 1
    return texts[0][:cut]


class ExpertIndex:
    """Finds the tensors of routed experts among those of a checkpoint.

    Args:
        geometry: from config.json.
        tensors: every tensor by name.
        folder: for the messages.

    Raises:
        BrokenCheckpoint: MISSING_EXPERT, EXTRA_EXPERT, WRONG_SHAPE, WRONG_DTYPE.
    """

    def __init__(
        self, geometry: ModelGeometry, tensors: dict[str, TensorInfo], folder: Path
    ) -> None:
        self._geometry = geometry
        self._tensors = tensors
        self._folder = folder
        self._layout = LAYOUTS[geometry.layout]
        self._pattern = name_pattern(self._layout)
        self._prefix = self._find_prefix()
        self._refuse_extras()
        for layer in geometry.moe_layers:
            for expert in range(geometry.experts):
                self.find(layer, expert)

    def is_expert(self, name: str) -> bool:
        """Whether a tensor belongs to a routed expert of one of the model's own MoE layers."""
        match = self._pattern.fullmatch(name)
        return bool(match) and int(match["i"]) < self._geometry.layers  # type: ignore[index]

    def names(self) -> Iterator[str]:
        """The tensors of all routed experts."""
        return filter(self.is_expert, self._tensors)

    def find(self, layer: int, expert: int) -> ExpertTensors:
        """Where one expert lies."""
        hidden, inter = self._geometry.hidden, self._geometry.intermediate
        gate, up, down = self._layout.gate, self._layout.up, self._layout.down
        halves = (0, 2), (1, 2)
        of_gate, of_up = halves if gate == up else ((0, 1), (0, 1))
        return ExpertTensors(
            gate=self._matrix(layer, expert, gate, (inter, hidden), of_gate),
            up=self._matrix(layer, expert, up, (inter, hidden), of_up),
            down=self._matrix(layer, expert, down, (hidden, inter), (0, 1)),
        )

    def _find_prefix(self) -> str:
        layer, first = self._geometry.moe_layers[0], self._layout.gate
        for prefix in self._layout.prefixes:
            if self._layout.codes.format(p=prefix, i=layer, e=0, m=first) in self._tensors:
                return prefix
        name = self._layout.codes.format(p=self._layout.prefixes[0], i=layer, e=0, m=first)
        what = (
            f"no tensor {name!r}: the {self._geometry.expert_format} experts are not where expected"
        )
        raise BrokenCheckpoint(Fault.MISSING_EXPERT, self._folder, what)

    def _refuse_extras(self) -> None:
        """An expert past the config's count, or a layer past its drafts: not this model's files."""
        geometry = self._geometry
        layers = set(geometry.moe_layers)
        layers |= set(range(geometry.layers, geometry.layers + geometry.draft_layers))
        for name, info in self._tensors.items():
            match = self._pattern.fullmatch(name)
            if not match:
                continue
            expert = int(match["e"]) if "e" in match.re.groupindex else 0
            own = int(match["i"]) < geometry.layers
            if int(match["i"]) not in layers or (own and expert >= geometry.experts):
                has = f"{geometry.experts} experts, MoE layers {self._range()}"
                what = f"{name!r} is there, config.json has {has}"
                raise BrokenCheckpoint(Fault.EXTRA_EXPERT, info.file, what)

    def _range(self) -> str:
        return f"{self._geometry.moe_layers[0]} to {self._geometry.moe_layers[-1]}"

    def _matrix(
        self, layer: int, expert: int, m: str, shape: tuple[int, int], part: tuple[int, int]
    ) -> MatrixSpans:
        """One matrix; ``part`` is (which, of how many) whose rows alternate in the tensor."""
        rows, k = shape
        names = {"p": self._prefix, "i": layer, "e": expert, "m": m}
        fused = self._layout.fused
        lead = (self._geometry.experts, rows * part[1]) if fused else (rows * part[1],)
        code_tail = (k // BLOCK, BLOCK // 2) if fused else (k // 2,)

        def span(template: str, dtypes: tuple[str, ...], tail: tuple[int, ...]) -> Span:
            info = self._checked(template.format(**names), dtypes, (*lead, *tail))
            return _cut(info, rows, part, expert if fused else 0, lead[0] if fused else 1)

        bias = self._layout.bias
        return MatrixSpans(
            codes=span(self._layout.codes, _BYTES, code_tail),
            scales=span(self._layout.scales, _SCALES, (k // BLOCK,)),
            bias=span(bias, ("BF16",), ()) if bias else None,
        )

    def _checked(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> TensorInfo:
        info = self._tensors.get(name)
        if info is None:
            what = f"the tensor {name!r} is missing"
            raise BrokenCheckpoint(Fault.MISSING_EXPERT, self._folder, what)
        if info.shape != shape:
            what = f"{name!r} has the shape {list(info.shape)}, config.json asks for {list(shape)}"
            raise BrokenCheckpoint(Fault.WRONG_SHAPE, info.file, what)
        if info.dtype not in dtypes:
            what = f"{name!r} is {info.dtype}, not {' or '.join(dtypes)}"
            raise BrokenCheckpoint(Fault.WRONG_DTYPE, info.file, what)
        return info


def _cut(info: TensorInfo, rows: int, part: tuple[int, int], expert: int, experts: int) -> Span:
    """Matrix ``expert`` of the ``experts`` in a tensor; of its rows those numbered ``part``."""
    which, of = part
    matrix_bytes = info.nbytes // experts
    row_bytes = matrix_bytes // (rows * of)
    offset = info.offset + expert * matrix_bytes + which * row_bytes
    return Span(info.file, info.name, offset, rows, row_bytes, of * row_bytes)
