"""Rules of the kernels' sources that no run on this machine can show.

A unit built for AVX-512 must not give the linker a function that a plain processor then runs. So
the units of the instruction sets keep everything internal and use no library code that is emitted
as a weak symbol: their includes are listed here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CPU = Path(__file__).parents[2] / "csrc" / "cpu"
SOURCES = sorted(CPU.iterdir())
OWN = {"kernels.h", "kernels.inl", "portable.h", "avx2.h", "avx512vnni.h"}
# Types, C declarations and always-inline intrinsics only.
PLAIN = {"cstddef", "cstdint", "cstring", "immintrin.h"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_includes_emit_no_code(path: Path) -> None:
    text = path.read_text()
    allowed = OWN | PLAIN | ({"cmath"} if path.name == "portable.h" else set())  # C's fmaf
    assert set(re.findall(r'^#include [<"]([^>"]+)[>"]', text, re.M)) <= allowed
    assert "std::" not in text


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_bf16_is_never_rounded_by_the_instruction_that_flushes(path: Path) -> None:
    assert not re.search(r"_mm\d*_cvtne\w*pbh", path.read_text())
