"""One expert from the checkpoint's files into its record: pread, cut this rank's slice, repack.

Tensor parallelism splits the intermediate size in whole blocks of 32: a rank has the same slice of
gate's rows, up's rows and down's columns (docs/numerics.md, section 4). gate and up are read by
rows, so nothing of the other ranks is read. A row of down holds all ranks' columns in one or two
KiB; the kernel reads files by pages of 4 KiB, so down is read whole and cut in memory.

Everything goes in bands of rows that fit a core's cache: the bytes travel from the page cache to
the record once, and a thread needs a MiB or two however large an expert is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from moet import _core
from moet.base.errors import FormatError, UsageError
from moet.checkpoint.experts import ExpertTensors, MatrixSpans, Span
from moet.checkpoint.faults import BrokenCheckpoint, Fault
from moet.checkpoint.header import TensorInfo
from moet.formats.mxfp4 import BLOCK, BLOCK_BYTES
from moet.formats.tiling import STRIP_ROWS, ExpertLayout, ceil_div

U8 = NDArray[np.uint8]

_BAND_BYTES = 1 << 20  # read, then repacked from a near cache; smaller, and Python's share shows


def intermediate_slice(intermediate: int, rank: int, world: int) -> range:
    """The intermediate channels of one rank: whole blocks floor(r*KB/TP)..floor((r+1)*KB/TP)-1.

    Raises:
        UsageError: no such rank, or more ranks than blocks.
    """
    blocks = intermediate // BLOCK
    if not 0 <= rank < world:
        raise UsageError(f"rank {rank} of {world}", hint="ranks count from 0 to world - 1")
    if world > blocks:
        raise UsageError(
            f"{blocks} blocks of intermediate size {intermediate} cannot feed {world} ranks",
            hint=f"use a tensor-parallel size of {blocks} or less",
        )
    return range(rank * blocks // world * BLOCK, (rank + 1) * blocks // world * BLOCK)


class OpenFiles:
    """Read-only descriptors, opened at first use, shared by threads (pread has no position)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fds: dict[Path, int] = {}

    def fd(self, file: Path) -> int:
        """The descriptor of a file.

        Raises:
            BrokenCheckpoint: UNREADABLE.
        """
        with self._lock:
            if file not in self._fds:
                self._fds[file] = _open(file)
            return self._fds[file]

    def close(self) -> None:
        """Closes them all."""
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()


def _open(file: Path) -> int:
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise BrokenCheckpoint(Fault.UNREADABLE, file, what) from error
    return fd


def _pread(fd: int, out: U8, offset: int, file: Path) -> None:
    """Fills ``out`` from ``offset`` on."""
    done, view = 0, out.data
    while done < out.size:
        try:
            got = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            what = f"reading at byte {offset + done} failed: {error.strerror}"
            raise BrokenCheckpoint(Fault.UNREADABLE, file, what) from error
        if got == 0:
            what = f"it ends at byte {offset + done}: it was cut after its header was read"
            raise BrokenCheckpoint(Fault.TRUNCATED, file, what)
        done += got


@dataclass(frozen=True, slots=True)
class _Rows:
    """Part of a matrix in scratch memory.

    Attributes:
        codes: u8 [rows, 16 * blocks], rows possibly apart.
        scales: u8 [rows, blocks], the same.
        span: of the scales, to name a bad one.
        first_row: row of the span that row 0 is.
        first_block: block of the span's rows that block 0 is.
    """

    codes: U8
    scales: U8
    span: Span
    first_row: int
    first_block: int


class ExpertReader:
    """Reads experts one after the other with scratch memory of its own: one a thread.

    Args:
        tensors: the checkpoint's, to name a bad scale byte by its place.
        files: shared descriptors.
        layout: of the record, its intermediate size being that of the slice.
        channels: the slice of the intermediate size (``intermediate_slice``).
        down_bias: whether this rank adds down's bias (rank 0 alone does).
        drop_cache: tell the kernel to forget what was read.
    """

    def __init__(
        self,
        tensors: dict[str, TensorInfo],
        files: OpenFiles,
        layout: ExpertLayout,
        channels: range,
        *,
        down_bias: bool,
        drop_cache: bool,
    ) -> None:
        self._tensors = tensors
        self._files = files
        self._layout = layout
        self._channels = channels
        self._down_bias = down_bias
        self._drop_cache = drop_cache
        self._scratch: dict[str, U8] = {}
        self.bytes_read = 0

    def read(self, expert: ExpertTensors, record: U8) -> None:
        """Fills ``record``, u8 [layout.record_bytes], its padding included.

        Raises:
            BrokenCheckpoint: a file cannot be read, or has shrunk.
            FormatError: a scale byte 255, with the tensor's name and the index.
        """
        layout, channels, down = self._layout, self._channels, expert.down
        self._announce(expert)
        for first, count in _bands(len(channels), expert.gate.codes.step):
            gate, up = self._gate_up(expert, channels.start + first, count)
            stride, strip = 2 * layout.gate_up_strip_bytes, first // STRIP_ROWS
            self._repack(gate, record[layout.gate_strip(strip) :], stride)
            self._repack(up, record[layout.up_strip(strip) :], stride)
        for first, count in _bands(down.codes.rows, down.codes.step):
            rows = self._down(down, first, count)
            strip = first // STRIP_ROWS
            self._repack(rows, record[layout.down_strip(strip) :], layout.down_strip_bytes)
        record[layout.gate_bias :] = 0
        if layout.biased:
            self._write_biases(expert, record)

    def _announce(self, expert: ExpertTensors) -> None:
        """Tells the kernel what will be read, so that the drive is busy while we repack."""
        first, count = self._channels.start, len(self._channels)
        for matrix, start, rows in (
            (expert.gate, first, count),
            (expert.up, first, count),
            (expert.down, 0, expert.down.codes.rows),
        ):
            for span in (matrix.codes, matrix.scales):
                fd, offset = self._files.fd(span.file), span.offset + start * span.step
                os.posix_fadvise(fd, offset, rows * span.step, os.POSIX_FADV_WILLNEED)

    def _gate_up(self, expert: ExpertTensors, first: int, count: int) -> tuple[_Rows, _Rows]:
        """Rows of gate and of up, from channel ``first`` on."""
        gate, up = expert.gate, expert.up
        codes = self._pair("codes", gate.codes, up.codes, first, count)
        scales = self._pair("scales", gate.scales, up.scales, first, count)
        return (
            _Rows(codes[0], scales[0], gate.scales, first, 0),
            _Rows(codes[1], scales[1], up.scales, first, 0),
        )

    def _down(self, down: MatrixSpans, first: int, count: int) -> _Rows:
        """Rows of down from row ``first`` on, cut to this rank's columns."""
        codes = self._rows("gate codes", down.codes, first, count)
        scales = self._rows("gate scales", down.scales, first, count)
        blocks = slice(self._channels.start // BLOCK, self._channels.stop // BLOCK)
        columns = slice(blocks.start * BLOCK_BYTES, blocks.stop * BLOCK_BYTES)
        return _Rows(codes[:, columns], scales[:, blocks], down.scales, first, blocks.start)

    def _repack(self, matrix: _Rows, out: U8, strip_stride: int) -> None:
        """Rows to strips, the padding of strips and groups zeroed."""
        codes, scales = matrix.codes, matrix.scales
        rows, blocks = scales.shape
        reserved = _core.repack_matrix(
            codes.ctypes.data,
            codes.strides[0],
            scales.ctypes.data,
            scales.strides[0],
            rows,
            blocks,
            out.ctypes.data,
            strip_stride,
            ceil_div(rows, STRIP_ROWS),
        )
        if reserved >= 0:
            row, block = divmod(reserved, blocks)
            self._refuse(matrix.span, matrix.first_row + row, matrix.first_block + block)

    def _write_biases(self, expert: ExpertTensors, record: U8) -> None:
        """The biases as fp32 behind the strips; down's stays zero on ranks that do not add it."""
        assert expert.gate.bias is not None
        assert expert.up.bias is not None
        assert expert.down.bias is not None
        first, count = self._channels.start, len(self._channels)
        gate, up = self._pair("bias", expert.gate.bias, expert.up.bias, first, count)
        _put(record, self._layout.gate_bias, _widen_bf16(gate))
        _put(record, self._layout.up_bias, _widen_bf16(up))
        if self._down_bias:
            down = self._rows("gate bias", expert.down.bias, 0, expert.down.bias.rows)
            _put(record, self._layout.down_bias, _widen_bf16(down))

    def _pair(self, what: str, gate: Span, up: Span, first: int, count: int) -> tuple[U8, U8]:
        """Rows of gate and of up; where they alternate in one tensor, by one read."""
        if gate.tensor != up.tensor:
            return (
                self._rows(f"gate {what}", gate, first, count),
                self._rows(f"up {what}", up, first, count),
            )
        both = self._read(what, gate, gate.offset + first * gate.step, count * gate.step)
        rows = both.reshape(count, 2, gate.row_bytes)
        return rows[:, 0], rows[:, 1]

    def _rows(self, what: str, span: Span, first: int, count: int) -> U8:
        offset, nbytes = span.offset + first * span.step, count * span.row_bytes
        return self._read(what, span, offset, nbytes).reshape(count, span.row_bytes)

    def _read(self, what: str, span: Span, offset: int, nbytes: int) -> U8:
        buffer = self._scratch.get(what)
        if buffer is None or buffer.size < nbytes:
            buffer = self._scratch[what] = np.empty(nbytes, np.uint8)
        fd = self._files.fd(span.file)
        _pread(fd, buffer[:nbytes], offset, span.file)
        self.bytes_read += nbytes
        if self._drop_cache:
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
        return buffer[:nbytes]

    def _refuse(self, span: Span, row: int, block: int) -> NoReturn:
        """A scale byte 255, named by its index in the checkpoint's own tensor."""
        info = self._tensors[span.tensor]
        flat = span.offset + row * span.step + block - info.offset
        where = ", ".join(str(int(i)) for i in np.unravel_index(flat, info.shape))
        raise FormatError(
            f"{span.file}: {span.tensor}[{where}] is the scale byte 255 (NaN)",
            hint="the file is damaged or is not MXFP4: download it again, compare its checksum",
        )


def _bands(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """(first, count) of bands of whole strips whose codes stay in a core's cache."""
    band = max(1, _BAND_BYTES // (row_bytes * STRIP_ROWS)) * STRIP_ROWS
    for first in range(0, rows, band):
        yield first, min(band, rows - first)


def _widen_bf16(raw: U8) -> NDArray[np.float32]:
    """bf16 bytes [n, 2] as fp32 [n], exactly."""
    words = np.ascontiguousarray(raw).view("<u2").reshape(-1).astype(np.uint32)
    return (words << np.uint32(16)).view(np.float32)


def _put(record: U8, offset: int, values: NDArray[np.float32]) -> None:
    record[offset : offset + values.nbytes] = values.astype("<f4").view(np.uint8)
