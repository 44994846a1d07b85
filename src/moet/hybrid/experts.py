"""THE HOT PATH: the routed experts of one MoE layer. Plan once, bind leases, run a step.

The algebra (docs/numerics.md; T tokens, K slots a token, W_e the matrices of expert e):

    q, be   = quantise(x[t])                                    MXINT8 or MXINT16, blocks of 32
    h       = gate(W_gate[e] . q) * (W_up[e] . q)               exact dots, one ordered sum a row
    row[s]  = round(W_down[e] . quantise(h))                    e = ids[t, s]
    out[t]  = round(scale * sum over s ascending of weights[t, s] * row[s])

Load-bearing: the order of blocks, segments and slots. Nothing else enters: not T, not the thread
that computes, not where the record lies. So a batch may be cut anywhere, and is.

Follow one token: the engine's op (engine/op.py) -> ``Experts.run`` below -> ``CpuLayer.run_at``
(kernels/cpu.py) -> csrc/runtime/layer.cpp, step.cpp -> csrc/cpu/kernels.inl.

``run`` allocates nothing and takes raw addresses: what they point at belongs to the caller.
"""

from __future__ import annotations

from collections.abc import Iterable

from moet.base.errors import TierError
from moet.kernels.cpu import MAX_TOKENS, MOST_TOKENS, CpuLayer, Pool
from moet.kernels.spec import DType, LayerSpec
from moet.tiers.api import Lease

SCRATCH_BYTES = 128 << 20
"""What a step's scratch may take. All layers of a pool share it."""


def tokens_a_step(spec: LayerSpec, most: int) -> int:
    """Tokens of one step: the more, the more tokens share an expert's bytes while they are read.

    Args:
        spec: the layer.
        most: tokens that a call will ever have.

    Returns:
        At most ``most``; else what ``SCRATCH_BYTES`` hold (h and the row of every slot, fp32 and
        quantised), but no fewer than ``MAX_TOKENS`` and no more than ``MOST_TOKENS``.
    """
    a_token = 8 * spec.top_k * (spec.hidden + spec.intermediate)
    return max(1, min(most, max(MAX_TOKENS, SCRATCH_BYTES // a_token), MOST_TOKENS))


def require_record(lease: Lease, spec: LayerSpec) -> None:
    """Refuses a record that is not one of the layer's.

    Raises:
        TierError: another size.
    """
    if lease.nbytes != spec.layout.record_bytes:
        raise TierError(
            f"the record of {lease.key} has {lease.nbytes} bytes, not {spec.layout.record_bytes}",
            hint="it was loaded for another geometry or another rank",
        )


class Experts:
    """The routed experts of one layer on this rank's CPUs. Made by ``plan``."""

    def __init__(self, layer: CpuLayer) -> None:
        self.spec = layer.spec
        self._layer = layer
        self._slots = layer.spec.top_k
        self._leases: dict[int, Lease] = {}

    def bind(self, leases: Iterable[Lease]) -> None:
        """Takes over leases of this layer's experts; they are held until ``close`` or until another
        record is bound to the expert. No step may be in flight.

        Raises:
            TierError: a record that is not of this layer's size.
            KernelError: an expert that the layer does not have.
        """
        for lease in leases:
            require_record(lease, self.spec)
            self._layer.bind(lease.key.expert, lease.address)
            replaced = self._leases.get(lease.key.expert)
            self._leases[lease.key.expert] = lease
            if replaced is not None and replaced is not lease:
                replaced.release()

    def close(self) -> None:
        """Forgets all experts and releases their leases; a second time does nothing."""
        while self._leases:
            expert, lease = self._leases.popitem()
            self._layer.unbind(expert)
            lease.release()

    @property
    def bound(self) -> int:
        """Experts that ``run`` can use."""
        return len(self._leases)

    @property
    def ran_isa(self) -> str | None:
        """The instruction set that computed the last step, told by its own kernels."""
        return self._layer.ran_isa

    def run(self, *, x: int, dtype: DType, tokens: int, weights: int, ids: int, out: int) -> None:
        """Computes one call. All addresses are of contiguous memory that stays alive.

        Args:
            x: [tokens, hidden] of ``dtype``.
            dtype: of x and of out.
            tokens: T, any number from 0 up.
            weights: fp32 [tokens, top_k].
            ids: int32 [tokens, top_k]; negative = empty slot.
            out: [tokens, hidden] of ``dtype``; may not overlap x.

        Raises:
            KernelError: before anything is computed; see ``CpuLayer.run_at``.
        """
        self._layer.run_at(
            x=x,
            x_type=dtype,
            tokens=tokens,
            ids=ids,
            weights=weights,
            slots=self._slots,
            out=out,
            out_type=dtype,
        )


def plan(spec: LayerSpec, max_tokens: int, pool: Pool, isa: str = "") -> Experts:
    """Sizes a layer for calls of up to ``max_tokens`` tokens; longer ones are cut into steps.

    Raises:
        KernelError: a shape or an instruction set that is not there.
    """
    return Experts(CpuLayer(spec, pool, isa, tokens_a_step(spec, max_tokens)))
