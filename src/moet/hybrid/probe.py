"""Which way of waiting works on this card: a tiny layer, captured and replayed, on each in turn.

Drivers, virtual machines and containers differ in what a stream may wait for. So it is tried at
start-up, once, with the real kernels and a real answer, and what is not right to the bit in time is
not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import MachineError, MoetError, UsageError
from moet.formats.mxint import ActFormat
from moet.hybrid.card import HybridCard, HybridLink
from moet.hybrid.mailbox import Mailbox, MailSizes, Variant
from moet.hybrid.step import HybridLayer
from moet.hybrid.table import ExpertTable
from moet.kernels.cpu import CpuLayer, Pool
from moet.kernels.cuda.layer import CudaLayer, Step, workspace_of
from moet.kernels.cuda.plan import plan_layer
from moet.kernels.cuda.synthetic import random_records
from moet.kernels.spec import DType, LayerSpec

AUTO: Final = "auto"
_SPEC: Final = LayerSpec(hidden=64, intermediate=32, experts=2, top_k=1, act=ActFormat.MXINT8)
_TOKENS: Final = 2
_REPLAYS: Final = 3
_STALL_SECONDS: Final = 0.5
_SCALES: Final = (118, 127)


class Replayable(Protocol):
    """A captured graph."""

    def replay(self) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class ProbeCard(HybridCard, Protocol):
    """What the probe needs of a GPU."""

    def upload(self, address: int, data: NDArray[Any]) -> None: ...  # noqa: D102
    def download(self, data: NDArray[Any], address: int) -> None: ...  # noqa: D102
    def capture(self, stream: int, work: Any) -> Replayable: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What the probe of one variant has shown.

    Attributes:
        variant: which.
        fault: why it cannot be used; empty: it can.
    """

    variant: Variant
    fault: str


def parse(text: str) -> Variant | None:
    """The value of MOET_MAILBOX; None for ``auto``.

    Raises:
        UsageError: there is no such variant.
    """
    if text in {"", AUTO}:
        return None
    try:
        return Variant(text)
    except ValueError:
        names = ", ".join([AUTO, *Variant])
        raise UsageError(f"MOET_MAILBOX={text!r} is no variant", hint=f"one of {names}") from None


def choose(card: ProbeCard, link: HybridLink, pool: Pool, forced: str = AUTO) -> Variant:
    """The first variant that works, in the order of their speed, or the forced one.

    Raises:
        UsageError: the forced one does not exist.
        MachineError: none works, or the forced one does not; says why of each.
    """
    only = parse(forced)
    results = []
    for variant in Variant if only is None else (only,):
        results.append(probe(card, link, pool, variant))
        if not results[-1].fault:
            return variant
    faults = "; ".join(f"{r.variant}: {r.fault}" for r in results)
    raise MachineError(
        f"the card and the CPU cannot wait for each other ({faults})",
        hint="set MOET_MAILBOX=auto, or look at the driver's version",
    )


def probe(card: ProbeCard, link: HybridLink, pool: Pool, variant: Variant) -> ProbeResult:
    """Tries one variant."""
    try:
        fault = _Trial(card, link, pool, variant).fault()
    except MoetError as error:
        fault = str(error)
    return ProbeResult(variant=variant, fault=fault)


class _Trial:
    """A layer of two experts, none on the card, run as a graph."""

    def __init__(self, card: ProbeCard, link: HybridLink, pool: Pool, variant: Variant) -> None:
        rng = np.random.default_rng(0)
        self.card, self.stream = card, card.stream()
        self.records = random_records(rng, _SPEC, _SCALES)
        self.cpu = CpuLayer(_SPEC, pool, max_tokens=_TOKENS)
        for expert, record in enumerate(self.records):
            self.cpu.bind(expert, record.ctypes.data)
        self.x = (rng.standard_normal((_TOKENS, _SPEC.hidden)).astype(np.float32)).astype(
            np.float16
        )
        self.ids = np.array([[1], [0]], np.int32)
        self.weights = np.ones((_TOKENS, 1), np.float32)
        self.table = ExpertTable(card, link, _SPEC.experts)
        self.held: list[int] = []
        self.mailbox = Mailbox(
            card,
            link,
            pool,
            sizes=MailSizes.of(_SPEC, _TOKENS),
            variant=variant,
            stall_seconds=_STALL_SECONDS,
        )

    def fault(self) -> str:
        """Why the variant cannot be used, or nothing."""
        try:
            return self._run()
        finally:
            self.mailbox.close()
            self.table.close()
            for address in self.held:
                self.card.free(address)

    def _run(self) -> str:
        want = self.cpu.run(self.x, self.ids, self.weights, DType.F32)
        self.mailbox.attach(0, self.cpu)
        layer, step = self._layer(), self._step()
        self.table.publish(self.stream)
        with self.mailbox.recording() as posts:
            graph = self.card.capture(self.stream, lambda: layer.run(step, self.stream))
        try:
            for _ in range(_REPLAYS):
                self.card.fill(step.out, 0x5A, want.nbytes)
                self.mailbox.announce(posts[0])
                graph.replay()
                got = np.empty_like(want)
                self.card.download(got, step.out)
                self.mailbox.check()
                if got.tobytes() != want.tobytes():
                    return "the rows that arrive are not those that were sent"
        finally:
            graph.close()
        return ""

    def _allocate(self, nbytes: int) -> int:
        self.held.append(self.card.allocate(nbytes))
        return self.held[-1]

    def _upload(self, data: NDArray[Any]) -> int:
        address = self._allocate(data.nbytes)
        self.card.upload(address, data)
        return address

    def _layer(self) -> HybridLayer:
        plan = plan_layer(_SPEC, self.card.card, _TOKENS)
        nbytes = workspace_of(_SPEC, plan).nbytes
        workspace = self._allocate(nbytes)
        self.card.fill(workspace, 0, nbytes)
        kernels = CudaLayer(
            _SPEC,
            self.card.card,
            self.card,
            table=self.table.address,
            workspace=workspace,
            max_tokens=_TOKENS,
        )
        return HybridLayer(0, kernels, self.table, self.mailbox)

    def _step(self) -> Step:
        return Step(
            x=self._upload(self.x),
            x_type=DType.F16,
            tokens=_TOKENS,
            ids=self._upload(self.ids),
            weights=self._upload(self.weights),
            out=self._allocate(4 * _TOKENS * _SPEC.hidden),
            out_type=DType.F32,
        )
