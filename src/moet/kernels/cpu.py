"""The CPU kernels, typed: a thin wrapper of ``moet._core``. Same bits as `kernels.reference`.

Plan (`Pool`, `CpuLayer`) may allocate; bind only takes addresses; `CpuLayer.run_at` allocates
nothing. Refusals of the core arrive as `KernelError` with their hint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from moet import _core
from moet.base.errors import KernelError
from moet.kernels.spec import DType, LayerSpec
from moet.machine.cpu import read_cpu

__all__ = [
    "CpuLayer",
    "Pool",
    "ReadProbe",
    "choose_isa",
    "isa_available",
    "release_workers",
    "stall_worker",
]

P = ParamSpec("P")
R = TypeVar("R")

MAX_TOKENS: Final = 64
"""Tokens of one step, unless a layer is planned for more: longer calls are cut into steps."""

MOST_TOKENS: Final = 0xFFFF
"""Tokens of one step at most (`kMaxItems` of csrc/runtime/board.h)."""

_NUMPY: Final[dict[DType, type[np.generic]]] = {
    DType.F32: np.float32,
    DType.BF16: np.uint16,
    DType.F16: np.float16,
}


def _named(call: Callable[P, R]) -> Callable[P, R]:
    """Turns a refusal of the core into a KernelError."""

    @functools.wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except _core.Refusal as refusal:
            raise _error(refusal) from None

    return checked


def _error(refusal: _core.Refusal) -> KernelError:
    message, hint = refusal.args
    return KernelError(message, hint=hint)


def isa_available() -> tuple[str, ...]:
    """Kernel vocabularies that this machine can run, best first; ``portable`` is always there."""
    return tuple(_core.isa_available())


def choose_isa(forced: str = "") -> str:
    """The vocabulary to run: the best one, or the forced one.

    Raises:
        KernelError: the forced vocabulary is unknown, or this machine cannot run it.
    """
    have = isa_available()
    if not forced:
        return have[0]
    if forced not in have:
        raise KernelError(
            f"instruction set {forced!r} is not available on this machine",
            hint=f"it has {', '.join(have)}; unset MOET_ISA to take the best",
        )
    return forced


def default_cpus() -> tuple[int, ...]:
    """The CPUs that this process may use, one of each physical core first."""
    cpu = read_cpu()
    return cpu.cores + tuple(c for c in cpu.usable if c not in cpu.cores)


class Pool:
    """Threads that run one step at a time; the calling thread is one of them.

    Workers pin themselves, one CPU each. Idle workers sleep.

    Args:
        threads: workers, the caller included; 0 = one a usable core, within the CPU quota.
        cpus: logical CPUs to run on, best first; None = all that this process may use. Read them
            before an engine pins its thread, and pass them.

    Raises:
        KernelError: no such CPU, or a number of threads that cannot be made.
    """

    @_named
    def __init__(self, threads: int = 0, cpus: Sequence[int] | None = None) -> None:
        chosen = default_cpus() if cpus is None else tuple(cpus)
        self.core = _core.Pool(threads or read_cpu().threads, chosen)

    @property
    def threads(self) -> int:
        """Workers, the caller included."""
        return self.core.threads

    @property
    def cpus(self) -> tuple[int, ...]:
        """CPUs in the order of the workers."""
        return tuple(self.core.cpus)

    @property
    def heartbeat(self) -> int:
        """Beginnings and ends of steps so far: odd while a step is in flight."""
        return self.core.heartbeat

    @_named
    def set_heartbeat(self, address: int) -> None:
        """Moves the heartbeat (a 64-bit counter) to an address; 0 moves it back.

        Raises:
            KernelError: the address is not a multiple of 8, or a step is in flight.
        """
        self.core.set_heartbeat(address)


def stall_worker(pool: Pool, worker: int, milliseconds: int) -> None:
    """For exams: a worker (-1: whichever comes first) stops at its next item.

    Args:
        pool: whose.
        worker: its number.
        milliseconds: for how long; -1: until `release_workers`.
    """
    _core.exam_stall(pool.core, worker, milliseconds)


def release_workers(pool: Pool) -> None:
    """Ends `stall_worker`."""
    _core.exam_release(pool.core)


class ReadProbe:
    """A plain read loop over memory, by the threads of a pool: what the memory can deliver.

    Args:
        pool: its threads.
        address: of the memory, a multiple of 64; it must outlive the probe.
        nbytes: 1 MiB or more; whole MiB of it are read.

    Raises:
        KernelError: other memory.
    """

    @_named
    def __init__(self, pool: Pool, address: int, nbytes: int) -> None:
        self._core = _core.ReadProbe(pool.core, address, nbytes)

    @_named
    def run(self) -> float:
        """Reads it once; returns bytes a second."""
        return self._core.run()


class CpuLayer:
    """The routed experts of one layer on the CPU: plan here, `bind`, then `run`.

    Args:
        spec: the layer.
        pool: its threads, and the scratch that all layers of the pool share.
        isa: a vocabulary of `isa_available`; empty = the best.
        max_tokens: tokens of one step (scratch grows with it); longer calls are cut.

    Raises:
        KernelError: a shape or a vocabulary that is not there; a step is in flight on the pool.
    """

    @_named
    def __init__(
        self, spec: LayerSpec, pool: Pool, isa: str = "", max_tokens: int = MAX_TOKENS
    ) -> None:
        self.spec = spec
        self.pool = pool
        self.isa = choose_isa(isa)
        self._scale = spec.output_scale
        self._core = _core.Layer(
            pool.core,
            self.isa,
            spec.hidden,
            spec.intermediate,
            spec.experts,
            spec.top_k,
            spec.act,
            spec.gate,
            spec.limit,
            spec.biased,
            spec.rows_bf16,
            max_tokens,
        )

    @property
    def ran_isa(self) -> str | None:
        """Vocabulary that computed the last step, told by its own kernels; None before it."""
        return self._core.ran_isa

    @property
    def workspace_bytes(self) -> int:
        """Scratch that this layer needs; the pool holds the largest of its layers' once."""
        return self._core.workspace_bytes

    @_named
    def bind(self, expert: int, address: int) -> None:
        """Takes the record of an expert (`spec.layout`), which must stay there until `unbind`.

        Raises:
            KernelError: no such expert, or an address that is not a multiple of 64.
        """
        self._core.bind(expert, address)

    @_named
    def unbind(self, expert: int) -> None:
        """Forgets the record of an expert: a routing to it is an error from then on."""
        self._core.unbind(expert)

    @_named
    def mark_foreign(self, expert: int) -> None:
        """Another rank owns the expert (expert parallelism): routings to it are skipped."""
        self._core.mark_foreign(expert)

    def attach_to(self, mailbox: _core.Mailbox, index: int) -> None:
        """Lets a mailbox answer a card's requests for the layer of that index.

        Raises:
            KernelError: a step is in flight.
        """
        try:
            mailbox.attach(index, self._core)
        except _core.Refusal as refusal:
            raise _error(refusal) from None

    def run_rows(
        self, x: NDArray[Any], ids: NDArray[np.int32]
    ) -> NDArray[np.uint16] | NDArray[np.float32]:
        """The rows of the routings, not combined.

        Args:
            x: [T, H], float32, float16, or uint16 holding bf16.
            ids: int32 [T, K]; rows of negative ids are not written (zero here).

        Returns:
            rows: [T, K, H]; bf16 as uint16 where the spec's rows are, else fp32.

        Raises:
            KernelError: as `run`.
        """
        x_type = self._check(x, ids, np.zeros(ids.shape, np.float32))
        x, ids = np.ascontiguousarray(x), np.ascontiguousarray(ids, np.int32)
        kind: type[np.generic] = np.uint16 if self.spec.rows_bf16 else np.float32
        rows = np.zeros((*ids.shape, self.spec.hidden), kind)
        self.run_rows_at(
            x=x.ctypes.data,
            x_type=x_type,
            tokens=x.shape[0],
            ids=ids.ctypes.data,
            slots=ids.shape[1],
            rows=rows.ctypes.data,
        )
        return rows

    def run_rows_at(
        self, *, x: int, x_type: DType, tokens: int, ids: int, slots: int, rows: int
    ) -> None:
        """As `run_rows`, on buffers given by address.

        Raises:
            KernelError: as `run_at`.
        """
        try:
            self._core.run_rows(x, x_type, tokens, ids, slots, rows)
        except _core.Refusal as refusal:
            raise _error(refusal) from None

    def combine_rows_at(
        self,
        *,
        rows: int,
        tokens: int,
        ids: int,
        weights: int,
        slots: int,
        out: int,
        out_type: DType,
    ) -> None:
        """Combines rows of one or several `run_rows_at` to what `run_at` would have made of them,
        bit for bit. Allocates nothing.

        Args:
            rows: [tokens, slots, H] in the layer's row type; those of negative ids are not read.
            tokens: T, any number.
            ids: int32 [tokens, slots]; only their signs count.
            weights: fp32 [tokens, slots].
            slots: at most `spec.top_k`.
            out: [tokens, H] of `out_type`.
            out_type: type of out.

        Raises:
            KernelError: another step in flight on the pool, more slots than planned.
        """
        try:
            self._core.combine_rows(rows, tokens, weights, ids, slots, out, out_type, self._scale)
        except _core.Refusal as refusal:
            raise _error(refusal) from None

    def run_at(
        self,
        *,
        x: int,
        x_type: DType,
        tokens: int,
        ids: int,
        weights: int,
        slots: int,
        out: int,
        out_type: DType,
        ids_64: bool = False,
    ) -> None:
        """Runs the layer on buffers given by address; they must be contiguous and stay alive.

        Args:
            x: [tokens, H] of `x_type`.
            x_type: type of x.
            tokens: T, any number.
            ids: int32 (int64 where `ids_64`) [tokens, slots]; negative = empty slot.
            weights: fp32 [tokens, slots].
            slots: at most `spec.top_k`.
            out: [tokens, H] of `out_type`.
            out_type: type of out.
            ids_64: ids are int64.

        Raises:
            KernelError: before anything is computed: an id that is out of range or not bound, a
                shape that was not planned, another step in flight on the pool, a forked process.
        """
        try:
            self._core.run(
                x, x_type, tokens, weights, ids, slots, out, out_type, self._scale, ids_64
            )
        except _core.Refusal as refusal:
            raise _error(refusal) from None

    def run(
        self,
        x: NDArray[Any],
        ids: NDArray[Any],
        weights: NDArray[np.float32],
        out_type: DType = DType.F32,
    ) -> NDArray[Any]:
        """Runs the layer on arrays.

        Args:
            x: [T, H], float32, float16, or uint16 holding bf16.
            ids: int32 or int64 [T, K]; negative = empty slot.
            weights: float32 [T, K].
            out_type: type of the result.

        Returns:
            out: [T, H]; bf16 as uint16.

        Raises:
            KernelError: shapes or types that do not fit, and all that `run_at` raises.
        """
        x_type = self._check(x, ids, weights)
        x, ids, weights = (np.ascontiguousarray(a) for a in (x, ids, weights))
        out = np.empty(x.shape, _NUMPY[out_type])
        self.run_at(
            x=x.ctypes.data,
            x_type=x_type,
            tokens=x.shape[0],
            ids=ids.ctypes.data,
            weights=weights.ctypes.data,
            slots=ids.shape[1],
            out=out.ctypes.data,
            out_type=out_type,
            ids_64=ids.dtype == np.int64,
        )
        return out

    def _check(self, x: NDArray[Any], ids: NDArray[Any], weights: NDArray[np.float32]) -> DType:
        types = [t for t, kind in _NUMPY.items() if x.dtype == kind]
        fits = x.ndim == ids.ndim == 2 and x.shape == (ids.shape[0], self.spec.hidden)
        if not types or not fits:
            raise KernelError(
                f"x is {x.dtype} {list(x.shape)} beside ids {list(ids.shape)}",
                hint=f"x: float32, float16 or uint16 (bf16) [T, {self.spec.hidden}]; ids: [T, K]",
            )
        if ids.dtype not in (np.int32, np.int64) or weights.dtype != np.float32:
            raise KernelError(
                f"ids are {ids.dtype}, weights {weights.dtype}",
                hint="ids: int32 or int64; weights: float32",
            )
        if weights.shape != ids.shape:
            raise KernelError(
                f"weights {list(weights.shape)} beside ids {list(ids.shape)}",
                hint="one weight a slot",
            )
        return types[0]
