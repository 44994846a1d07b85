"""One expert from the checkpoint's files into its record: pread, cut this rank's slice, repack.

Tensor parallelism splits the intermediate size in whole blocks of 32: a rank has the same slice of
gate's rows, up's rows and down's columns (docs/numerics.md, section 4). gate and up are read by
rows, so nothing of the other ranks is read. A row of down holds all ranks' columns in one or two
KiB; the kernel reads files by pages of 4 KiB, so down is read whole and cut in memory.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import FormatError, UsageError
from moet.checkpoint.experts import ExpertTensors, MatrixSpans, Span
from moet.checkpoint.faults import BrokenCheckpoint, Fault
from moet.checkpoint.header import TensorInfo
from moet.formats.mxfp4 import BLOCK, BLOCK_BYTES, SCALE_NAN, Mxfp4Matrix
from moet.formats.tiling import ExpertLayout, ExpertWeights, write_expert

U8 = NDArray[np.uint8]


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
    done, view = 0, memoryview(out)
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


class ExpertReader:
    """Reads experts one after the other with its own scratch memory: one per thread.

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
        """Fills ``record``, u8 [layout.record_bytes].

        Raises:
            BrokenCheckpoint: a file cannot be read, or has shrunk.
            FormatError: a scale byte 255, with the tensor's name and the index.
        """
        rows = self._channels
        first, count = rows.start, len(rows)
        gate, up = self._gate_up(expert, first, count)
        down = self._down(expert.down)
        biases = self._biases(expert, first, count) if self._layout.biased else (None,) * 3
        weights = ExpertWeights(gate, up, down, *biases)
        write_expert(self._layout, weights, record)

    def _gate_up(
        self, expert: ExpertTensors, first: int, count: int
    ) -> tuple[Mxfp4Matrix, Mxfp4Matrix]:
        codes = self._pair("codes", expert.gate.codes, expert.up.codes, first, count)
        scales = self._pair("scales", expert.gate.scales, expert.up.scales, first, count)
        self._check(scales[0], expert.gate.scales, first)
        self._check(scales[1], expert.up.scales, first)
        return Mxfp4Matrix(codes[0], scales[0]), Mxfp4Matrix(codes[1], scales[1])

    def _down(self, down: MatrixSpans) -> Mxfp4Matrix:
        codes = self._rows("down codes", down.codes, 0, down.codes.rows)
        scales = self._rows("down scales", down.scales, 0, down.scales.rows)
        self._check(scales, down.scales, 0)
        first, last = self._channels.start // BLOCK, self._channels.stop // BLOCK
        return Mxfp4Matrix(
            codes[:, first * BLOCK_BYTES : last * BLOCK_BYTES], scales[:, first:last]
        )

    def _biases(
        self, expert: ExpertTensors, first: int, count: int
    ) -> tuple[NDArray[np.float32], ...]:
        assert expert.gate.bias is not None
        assert expert.up.bias is not None
        assert expert.down.bias is not None
        gate, up = self._pair("bias", expert.gate.bias, expert.up.bias, first, count)
        down = self._rows("down bias", expert.down.bias, 0, expert.down.bias.rows)
        widened = tuple(_widen_bf16(bias) for bias in (gate, up, down))
        return (*widened[:2], widened[2] if self._down_bias else np.zeros_like(widened[2]))

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

    def _check(self, scales: U8, span: Span, first: int) -> None:
        """Refuses the scale byte 255, named by its index in the checkpoint's own tensor."""
        if not (scales == SCALE_NAN).any():
            return
        row, block = (int(i) for i in np.argwhere(scales == SCALE_NAN)[0])
        info = self._tensors[span.tensor]
        flat = span.offset + (first + row) * span.step + block - info.offset
        where = ", ".join(str(int(i)) for i in np.unravel_index(flat, info.shape))
        raise FormatError(
            f"{span.file}: {span.tensor}[{where}] is the scale byte 255 (NaN)",
            hint="the file is damaged or is not MXFP4: download it again, compare its checksum",
        )


def _widen_bf16(raw: U8) -> NDArray[np.float32]:
    """bf16 bytes [n, 2] as fp32 [n], exactly."""
    words = np.ascontiguousarray(raw).view("<u2").reshape(-1).astype(np.uint32)
    return (words << np.uint32(16)).view(np.float32)
