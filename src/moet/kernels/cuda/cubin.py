"""What a cubin says about its kernels, read without any tool: registers, stack, instructions.

A cubin is an ELF file. Each kernel has its code in `.text.NAME`; `.nv.info` holds attribute records
whose layout was read off files of CUDA 12 and 13 and is checked in the tests against known kernels.
An instruction of sm_70 and later is 16 bytes; its low 12 bits name the operation.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from moet.base.errors import KernelError

_ELF_MAGIC: Final = b"\x7fELF\x02\x01"
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_SYMTAB: Final = 2

# Attribute records of .nv.info: u8 form, u8 attribute, u16 value or size.
_FORM_SIZED: Final = 4
_ATTRIBUTE_FRAME: Final = 0x11
_ATTRIBUTE_REGISTERS: Final = 0x2F

_TEXT: Final = ".text."
_INSTRUCTION_BYTES: Final = 16

OPCODES: Final[Mapping[str, frozenset[int]]] = {
    "IMMA": frozenset({0x237}),
    "LDL": frozenset({0x983}),
    "STL": frozenset({0x387}),
    "LDGSTS": frozenset({0xFAE}),
    "UBLKCP": frozenset({0x3BA}),
    "I2F": frozenset({0x306, 0x245}),
}
"""Low 12 bits of the operations that the gates ask about."""


@dataclass(frozen=True, kw_only=True)
class KernelInfo:
    """One kernel of a cubin.

    Attributes:
        name: its symbol.
        registers: of a thread.
        stack_bytes: local memory of a thread: arrays with run-time indices, and spills.
        static_shared_bytes: shared memory of a block, beside the dynamic part of the launch.
        operations: how often each operation (low 12 bits of the instruction) occurs in the code.
    """

    name: str
    registers: int
    stack_bytes: int
    static_shared_bytes: int
    operations: Counter[int]

    def count(self, operation: str) -> int:
        """Occurrences of an operation of `OPCODES`."""
        return sum(self.operations[code] for code in OPCODES[operation])


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    link: int
    data: bytes


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


def _sections(cubin: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", cubin, 40)
    count, names = struct.unpack_from("<HH", cubin, 60)
    headers = [_SECTION.unpack_from(cubin, table + i * _SECTION.size) for i in range(count)]
    start, size = headers[names][4:6]
    strings = cubin[start : start + size]
    return [_Section(_text(strings, h[0]), h[1], h[6], cubin[h[4] : h[4] + h[5]]) for h in headers]


def _symbols(sections: list[_Section]) -> list[str]:
    table = next(s for s in sections if s.kind == _SYMTAB)
    strings = sections[table.link].data
    return [_text(strings, symbol[0]) for symbol in _SYMBOL.iter_unpack(table.data)]


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _FORM_SIZED:
            yield attribute, info[at : at + value]
            at += value


def _per_kernel(info: bytes, wanted: int, symbols: list[str]) -> dict[str, int]:
    pairs = (struct.unpack("<II", v) for a, v in _attributes(info) if a == wanted and len(v) == 8)
    return {symbols[symbol]: value for symbol, value in pairs}


def _census(code: bytes) -> Counter[int]:
    words = struct.unpack(f"<{len(code) // 8}Q", code)
    return Counter(word & 0xFFF for word in words[:: _INSTRUCTION_BYTES // 8])


def read_cubin(cubin: bytes) -> dict[str, KernelInfo]:
    """The kernels of a cubin by name.

    Raises:
        KernelError: not a 64-bit little-endian ELF file, or one without kernels.
    """
    hint = "compile to a cubin (SASS), not to PTX"
    if not cubin.startswith(_ELF_MAGIC):
        raise KernelError("not a cubin: the ELF header is missing", hint=hint)
    try:
        kernels = _read(cubin)
    except (struct.error, IndexError, ValueError, StopIteration) as error:
        raise KernelError(f"a damaged cubin: {error}", hint=hint) from error
    if not kernels:
        raise KernelError("a cubin without kernels", hint=hint)
    return kernels


def _read(cubin: bytes) -> dict[str, KernelInfo]:
    sections = _sections(cubin)
    symbols = _symbols(sections)
    info = next(s.data for s in sections if s.name == ".nv.info")
    registers = _per_kernel(info, _ATTRIBUTE_REGISTERS, symbols)
    frames = _per_kernel(info, _ATTRIBUTE_FRAME, symbols)
    shared = {s.name.removeprefix(".nv.shared."): len(s.data) for s in sections}
    texts = {s.name.removeprefix(_TEXT): s.data for s in sections if s.name.startswith(_TEXT)}
    return {
        name: KernelInfo(
            name=name,
            registers=registers[name],
            stack_bytes=frames.get(name, 0),
            static_shared_bytes=shared.get(name, 0),
            operations=_census(code),
        )
        for name, code in texts.items()
        if name in registers
    }
