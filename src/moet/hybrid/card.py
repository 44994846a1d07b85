"""A model's hybrid layers on one card: plan, bind, place, then `layers[i].run` (step.py).

Every expert is bound to the CPU, from a tier in host memory; a split says which are on the card
too, and so who computes them, never what comes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from moet.base.errors import KernelError
from moet.hybrid.experts import require_record
from moet.hybrid.mailbox import STALL_SECONDS, Mailbox, MailCard, MailLink, MailSizes, Variant
from moet.hybrid.split import Split
from moet.hybrid.step import HybridLayer
from moet.hybrid.table import ExpertTable, TableLink
from moet.kernels.cpu import CpuLayer, Pool
from moet.kernels.cuda.layer import CudaLayer, workspace_of
from moet.kernels.cuda.plan import Card, plan_layer
from moet.kernels.spec import LayerSpec
from moet.tiers.api import RECORD_ALIGNMENT, ExpertKey, Lease
from moet.tiers.card import CardTier
from moet.tiers.memory import CardMemory

MAX_TOKENS = 64
"""Of one step; longer calls are cut."""


class HybridCard(MailCard, Protocol):
    """What the layers need of a GPU: `kernels.cuda.gpu.Gpu` has it."""

    card: Card


class HybridLink(MailLink, TableLink, Protocol):
    """What the layers need of its host link: `kernels.cuda.link.Link` has it."""


def _common(specs: Mapping[int, LayerSpec]) -> LayerSpec:
    """A layer that tells the sizes of all."""
    if not specs:
        raise KernelError("no layers", hint="a model without routed experts needs no moet")
    return next(iter(specs.values()))


class CardExperts:
    """The routed experts of a model on one card and this process's CPUs.

    Args:
        gpu: the card.
        link: its host link.
        memory: for uploads; of the same card.
        pool: the CPU's workers. Nobody else may use it while a step is in flight.
        specs: the layers by index, alike in hidden size, top-k and format.
        capacity_bytes: of the card, for experts.
        max_tokens: of a step.
        variant: how the card waits for the CPU.
        stall_seconds: an answer of the CPU without progress for so long is an error.
        isa: the CPU kernels; empty = the best.

    Raises:
        KernelError, TierError: a shape that has no kernel, or too little memory of either kind.
    """

    def __init__(
        self,
        gpu: HybridCard,
        link: HybridLink,
        memory: CardMemory,
        pool: Pool,
        specs: Mapping[int, LayerSpec],
        *,
        capacity_bytes: int,
        max_tokens: int = MAX_TOKENS,
        variant: Variant = Variant.POLL,
        stall_seconds: float = STALL_SECONDS,
        isa: str = "",
    ) -> None:
        self.specs = dict(specs)
        self.pool = pool
        self._gpu, self._memory = gpu, memory
        record = max(s.layout.record_bytes for s in specs.values()) if specs else 1
        sizes = MailSizes.of(_common(specs), max_tokens)
        self.tier = CardTier(
            memory, max(capacity_bytes, RECORD_ALIGNMENT), record_bytes=record, staging=4
        )
        self.mailbox = Mailbox(
            gpu, link, pool, sizes=sizes, variant=variant, stall_seconds=stall_seconds
        )
        self._workspace = self._claim_workspace(max_tokens)
        self.tables = {i: ExpertTable(gpu, link, s.experts) for i, s in specs.items()}
        self._cpu = {i: CpuLayer(s, pool, isa, max_tokens) for i, s in specs.items()}
        self.layers = {i: self._layer(i, max_tokens) for i in specs}
        self._leases: dict[ExpertKey, Lease] = {}
        self._resident: dict[ExpertKey, Lease] = {}

    def _claim_workspace(self, max_tokens: int) -> int:
        """One for all layers: they follow each other."""
        plans = [(s, plan_layer(s, self._gpu.card, max_tokens)) for s in self.specs.values()]
        nbytes = max(workspace_of(spec, plan).nbytes for spec, plan in plans)
        address = self._gpu.allocate(nbytes)
        self._gpu.fill(address, 0, nbytes)
        return address

    def _layer(self, index: int, max_tokens: int) -> HybridLayer:
        table = self.tables[index]
        kernels = CudaLayer(
            self.specs[index],
            self._gpu.card,
            self._gpu,
            table=table.address,
            workspace=self._workspace,
            max_tokens=max_tokens,
        )
        self.mailbox.attach(index, self._cpu[index])
        return HybridLayer(index, kernels, table, self.mailbox)

    def bind(self, leases: Iterable[Lease]) -> None:
        """Takes over leases of experts in host memory, and holds them until `close` or until
        another record is bound to the expert. No step may be in flight.

        Raises:
            TierError: a record that is not of its layer's size.
            KernelError: a layer that is not there, or an expert that its layer does not have.
        """
        for lease in leases:
            layer, expert = lease.key
            if layer not in self.specs:
                known = ", ".join(map(str, sorted(self.specs)))
                raise KernelError(f"there is no layer {layer}", hint=f"the layers are {known}")
            require_record(lease, self.specs[layer])
            self._cpu[layer].bind(expert, lease.address)
            replaced = self._leases.get(lease.key)
            self._leases[lease.key] = lease
            if replaced is not None and replaced is not lease:
                replaced.release()

    def place(self, split: Split, stream: int) -> int:
        """Makes the card hold the experts of the split, all of them bound, and no others. Steps
        that are enqueued on the stream from now on use them; steps before are not disturbed.

        Args:
            split: layer -> experts.
            stream: of the steps; not while it is captured.

        Returns:
            Bytes uploaded.

        Raises:
            TierError: they do not fit, or a copy failed. The card then holds those of the split
                that it held before.
            KernelError: an expert that is not bound.
        """
        wanted = {ExpertKey(i, e) for i, experts in split.items() for e in experts}
        missing = sorted(wanted - self._leases.keys())
        if missing:
            raise KernelError(
                f"{len(missing)} experts of the split are not bound, such as {missing[0]}",
                hint="bind every expert to the CPU first",
            )
        self._remove([k for k in self._resident if k not in wanted], stream)
        incoming = sorted(wanted - self._resident.keys())
        try:
            nbytes = self.tier.upload(self._leases[key] for key in incoming)
        except BaseException:
            for key in incoming:
                if key in self.tier:  # nobody has seen it yet
                    self.tier.evict(key)
            raise
        for key in incoming:
            lease = self._resident[key] = self.tier.acquire(key)
            self.tables[key.layer].put(key.expert, lease.address)
        self._publish(stream)
        return nbytes

    def _remove(self, keys: list[ExpertKey], stream: int) -> None:
        """Takes experts off the card: their room is free when the stream has passed this point."""
        for key in keys:
            self.tables[key.layer].remove(key.expert)
        self._publish(stream)
        fence = self._memory.record(stream)
        for key in keys:
            self._resident.pop(key).release()
            self.tier.evict(key, fence)
        self._memory.drop(fence)

    def _publish(self, stream: int) -> None:
        for table in self.tables.values():
            table.publish(stream)

    @property
    def resident(self) -> int:
        """Experts on the card."""
        return len(self._resident)

    def close(self) -> None:
        """Gives everything back. No step may be in flight.

        Raises:
            MachineError: see `Mailbox.close`.
        """
        self.mailbox.close()
        for lease in (*self._resident.values(), *self._leases.values()):
            lease.release()
        self._resident.clear()
        self._leases.clear()
        self.tier.close()
        for table in self.tables.values():
            table.close()
        if self._workspace:
            self._gpu.free(self._workspace)
            self._workspace = 0
