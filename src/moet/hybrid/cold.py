"""The routed experts of a layer that does not fit into memory: computed as they come.

    routing -> want -> groups of experts that are readable -> their rows -> the combine

A row has the same bits whenever it is computed, and the combine's order is that of the slots. So
any budget, any order of arrival and any grouping give the bits of ``Experts.run``
(docs/numerics.md, section 6). Where all experts of a call are in memory it is that very call.

An expert that cannot be read poisons the tokens that need it, and no others: their outputs are NaN,
and the outcome names expert and cause.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import KernelError, MoetError, TierError
from moet.hybrid.experts import tokens_a_step
from moet.hybrid.heat import Heat
from moet.hybrid.reference import at
from moet.kernels.cpu import CpuLayer, Pool
from moet.kernels.spec import DType, LayerSpec
from moet.tiers.api import ExpertKey, Lease
from moet.tiers.cascade import Cascade
from moet.tiers.policy import rates
from moet.tiers.wanted import Wanted

ROW_BYTES: Final = 256 << 20
"""What rows that wait for their combine may take; a call with more tokens than that is cut."""

Prefill = bool | NDArray[np.bool_]
Watch = Callable[[int, NDArray[np.int32], Prefill], None]

_NAN: Final = {DType.BF16: 0x7FFF, DType.F16: 0x7FFF, DType.F32: 0x7FFFFFFF}


class RowScratch:
    """Memory for rows, shared by the layers of a pool; whoever computes holds its lock.

    Args:
        most: bytes.
    """

    def __init__(self, most: int = ROW_BYTES) -> None:
        self.most = most
        self.lock = threading.Lock()
        self._bytes: NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> int:
        """Address of so many bytes, a multiple of 64; what was there before is lost."""
        if self._bytes.size < nbytes + 64:
            self._bytes = np.empty(nbytes + 64, np.uint8)
        address = int(self._bytes.ctypes.data)
        return address + -address % 64


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a call has met.

    Attributes:
        poisoned: tokens whose outputs are NaN, and the experts that each of them lacked.
        failed: why those could not be read.
        stalled_s: seconds for which there was nothing to compute.
    """

    poisoned: dict[int, tuple[ExpertKey, ...]] = field(default_factory=dict)
    failed: dict[ExpertKey, MoetError] = field(default_factory=dict)
    stalled_s: float = 0.0


@dataclass(frozen=True)
class _Part:
    """Tokens of a call that are computed together."""

    x: int
    dtype: DType
    weights: int
    out: int
    ids: NDArray[np.int32]
    prefill: Prefill
    first: int

    @property
    def tokens(self) -> int:
        return len(self.ids)


class ColdExperts:
    """The routed experts of one layer, wherever they are.

    Args:
        index: of the layer, as in the cascade's keys.
        layer: the kernels; nothing is bound to it.
        cascade: where the experts come from.
        scratch: for rows, shared with the other layers of the pool.
        watch: told layer, ids and prefill of every call, for recorders.

    Attributes:
        heat: tokens that each expert was given, int64 [E].

    Raises:
        TierError: the cascade lacks an expert of the layer, or its records are of another size.
    """

    def __init__(
        self,
        index: int,
        layer: CpuLayer,
        cascade: Cascade,
        scratch: RowScratch,
        watch: Watch | None = None,
    ) -> None:
        self.index = index
        self.spec = layer.spec
        self.heat: NDArray[np.int64] = np.zeros(self.spec.experts, np.int64)
        self._layer, self._cascade, self._scratch, self._watch = layer, cascade, scratch, watch
        self._keys = [ExpertKey(index, e) for e in range(self.spec.experts)]
        self._check_records()

    def _check_records(self) -> None:
        hint = "they are of another model, or of another rank"
        missing = [key for key in self._keys if key not in self._cascade]
        if missing:
            what = f"{len(missing)} experts of layer {self.index} are nowhere, such as {missing[0]}"
            raise TierError(what, hint=hint)
        wanted = self.spec.layout.record_bytes
        odd = [key for key in self._keys if self._cascade.nbytes(key) != wanted]
        if odd:
            size = self._cascade.nbytes(odd[0])
            raise TierError(f"the record of {odd[0]} has {size} bytes, not {wanted}", hint=hint)

    @property
    def bound(self) -> int:
        """Experts that ``run`` can use."""
        return len(self._keys)

    @property
    def ran_isa(self) -> str | None:
        """The instruction set that computed the last step, told by its own kernels."""
        return self._layer.ran_isa

    @property
    def _token_bytes(self) -> int:
        return self.spec.top_k * self.spec.hidden * (2 if self.spec.rows_bf16 else 4)

    def run(
        self,
        *,
        x: int,
        dtype: DType,
        tokens: int,
        weights: int,
        ids: int,
        out: int,
        prefill: Prefill = False,
    ) -> Outcome:
        """Computes one call; addresses and bits as in ``Experts.run``.

        Args:
            x: [tokens, hidden] of ``dtype``.
            dtype: of x and of out.
            tokens: T.
            weights: fp32 [tokens, top_k].
            ids: int32 [tokens, top_k]; negative = empty slot.
            out: [tokens, hidden] of ``dtype``; may not overlap x.
            prefill: which tokens are of a prefill, [tokens], or all or none: their experts do not
                push out what decode uses.

        Raises:
            KernelError: before anything is computed: an id that is out of range.
            TierError: the cascade was closed, or has no slot to spare; see ``Cascade.want``.
        """
        if tokens == 0:
            return Outcome()
        routing = np.maximum(at(ids, (tokens, self.spec.top_k), np.int32), -1)
        self._check(routing)
        if self._watch:
            self._watch(self.index, routing, prefill)
        poisoned: dict[int, tuple[ExpertKey, ...]] = {}
        failed: dict[ExpertKey, MoetError] = {}
        stalled_s = 0.0
        with self._scratch.lock:
            for part in self._parts(x, dtype, weights, out, routing, prefill):
                with self._cascade.want(*self._asks(part)) as call:
                    poisoned |= self._compute(part, call)
                failed |= call.failed
                stalled_s += call.stalled_s
        return Outcome(poisoned=poisoned, failed=failed, stalled_s=stalled_s)

    def _check(self, ids: NDArray[np.int32]) -> None:
        if ids.max() >= self.spec.experts:
            token, slot = np.argwhere(ids >= self.spec.experts)[0]
            raise KernelError(
                f"expert id {ids[token, slot]} of token {token}, slot {slot} is outside "
                f"0..{self.spec.experts - 1}",
                hint="negative ids mark empty slots; all others must name an expert of the layer",
            )

    def _parts(  # noqa: PLR0917  (the call's own arguments, in their order)
        self,
        x: int,
        dtype: DType,
        weights: int,
        out: int,
        ids: NDArray[np.int32],
        prefill: Prefill,
    ) -> Iterator[_Part]:
        """The call, cut where its rows would take too much."""
        each = max(1, self._scratch.most // self._token_bytes)
        row = self.spec.hidden * dtype.nbytes
        for first in range(0, len(ids), each):
            of = slice(first, first + each)
            yield _Part(
                x + first * row,
                dtype,
                weights + first * self.spec.top_k * 4,
                out + first * row,
                ids[of],
                prefill if isinstance(prefill, bool) else prefill[of],
                first,
            )

    def _asks(self, part: _Part) -> tuple[list[ExpertKey], bool | set[ExpertKey]]:
        """The experts of a part, those with most tokens first: they take longest to compute, while
        the others are read. And those of them that no decoding token asks for."""
        counts = self._counts(part.ids)
        self.heat += counts
        order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
        keys = [self._keys[e] for e in order]
        if isinstance(part.prefill, bool):
            return keys, part.prefill
        decoding = self._counts(part.ids[~part.prefill])
        return keys, {key for key in keys if not decoding[key.expert]}

    def _counts(self, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        return np.bincount(ids[ids >= 0], minlength=self.spec.experts)

    def _compute(self, part: _Part, call: Wanted) -> dict[int, tuple[ExpertKey, ...]]:
        """Fills the outputs of a part; returns its poisoned tokens."""
        groups = iter(call)
        group = next(groups, [])
        if not call.todo and not call.failed:  # all there: no row needs to wait
            with _Bound(self._layer, group):
                self._layer.run_at(**self._raw(part), x=part.x, x_type=part.dtype)
            return {}
        rows = self._scratch.take(part.tokens * self._token_bytes)
        while group:
            self._rows(part, group, rows)
            group = next(groups, [])
        lacking = self._lacking(part, call)
        tokens = [token - part.first for token in lacking]
        part.ids[tokens] = -1  # their rows are not all there
        self._layer.combine_rows_at(**self._raw(part), rows=rows)
        self._out(part)[tokens] = _NAN[part.dtype]
        return lacking

    def _raw(self, part: _Part) -> dict[str, Any]:
        """What running and combining have in common."""
        return {
            "tokens": part.tokens,
            "ids": part.ids.ctypes.data,
            "weights": part.weights,
            "slots": self.spec.top_k,
            "out": part.out,
            "out_type": part.dtype,
        }

    def _rows(self, part: _Part, group: list[Lease], rows: int) -> None:
        """Rows of the experts of a group."""
        ours = np.full(self.spec.experts + 1, -1, np.int32)  # the last one: of empty slots
        for lease in group:
            ours[lease.key.expert] = lease.key.expert
        ids = ours[part.ids]
        with _Bound(self._layer, group):
            self._layer.run_rows_at(
                x=part.x,
                x_type=part.dtype,
                tokens=part.tokens,
                ids=ids.ctypes.data,
                slots=self.spec.top_k,
                rows=rows,
            )

    def _lacking(self, part: _Part, call: Wanted) -> dict[int, tuple[ExpertKey, ...]]:
        """Tokens of the call that need an expert that could not be read, and which."""
        missing = np.isin(part.ids, [key.expert for key in call.failed])
        tokens = np.flatnonzero(missing.any(axis=1))
        return {
            part.first + int(t): tuple(self._keys[e] for e in np.unique(part.ids[t][missing[t]]))
            for t in tokens
        }

    def _out(self, part: _Part) -> NDArray[Any]:
        """The outputs of a part, as bits."""
        kind = np.uint32 if part.dtype is DType.F32 else np.uint16
        return at(part.out, (part.tokens, self.spec.hidden), kind)


class _Bound:
    """Experts that the kernels can find, inside of a ``with`` block."""

    def __init__(self, layer: CpuLayer, group: list[Lease]) -> None:
        self._layer, self._group = layer, group

    def __enter__(self) -> None:
        for lease in self._group:
            self._layer.bind(lease.key.expert, lease.address)

    def __exit__(self, *error: object) -> None:
        for lease in self._group:
            self._layer.unbind(lease.key.expert)


def rates_of(heat: Heat, top_k: int) -> dict[ExpertKey, float]:
    """Recorded heat as a cascade takes it: share of the tokens that asked for each expert.

    Args:
        heat: layer -> tokens that each expert was given, as `heat.read_heat` reads them.
        top_k: experts a token.
    """
    return {
        ExpertKey(layer, expert): float(share)
        for layer, counts in heat.items()
        for expert, share in enumerate(rates(np.array([counts], np.int64), top_k)[0])
    }


def plan(
    index: int,
    spec: LayerSpec,
    max_tokens: int,
    pool: Pool,
    *,
    cascade: Cascade,
    scratch: RowScratch,
    isa: str = "",
    watch: Watch | None = None,
) -> ColdExperts:
    """Sizes a layer for calls of up to ``max_tokens`` tokens; longer ones are cut into steps.

    Raises:
        KernelError: a shape or an instruction set that is not there.
        TierError: the cascade lacks an expert, or its records are of another geometry.
    """
    layer = CpuLayer(spec, pool, isa, tokens_a_step(spec, max_tokens))
    return ColdExperts(index, layer, cascade, scratch, watch)
