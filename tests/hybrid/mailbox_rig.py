"""Hybrid layers of one mailbox, and steps through them, for the tests of this room."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moet.formats.mxint import ActFormat
from moet.hybrid.mailbox import Mailbox, MailSizes, Variant
from moet.hybrid.step import HybridLayer
from moet.hybrid.table import ExpertTable
from moet.kernels.cpu import CpuLayer, Pool, default_cpus
from moet.kernels.cuda.layer import CudaLayer, Step, workspace_of
from moet.kernels.cuda.plan import plan_layer
from moet.kernels.spec import DType, LayerSpec
from moet.verify.cases import LayerCase, random_routing, random_x

Array = NDArray[Any]

SPECS = {
    "int8": LayerSpec(hidden=96, intermediate=64, experts=8, top_k=3, act=ActFormat.MXINT8),
    "int16": LayerSpec(
        hidden=64, intermediate=96, experts=6, top_k=2, act=ActFormat.MXINT16, output_scale=1.5
    ),
}
LONG = LayerSpec(hidden=512, intermediate=512, experts=8, top_k=3, act=ActFormat.MXINT8)
"""Long enough that every worker gets an item of it."""
MOST = 6
PATIENT, STALL = 20.0, 0.5
"""Seconds: a machine may be busy; only where a stop is wanted is it waited for briefly."""


Parts = tuple[Any, Any]
"""A card and its host link."""


class Rig:
    """Some hybrid layers of one mailbox on the stand-in, and the same layers on the CPU alone."""

    def __init__(
        self,
        parts: Parts,
        spec: LayerSpec,
        variant: Variant = Variant.POLL,
        *,
        layers: int = 2,
        stall: float = PATIENT,
    ) -> None:
        self.rng = np.random.default_rng(11)
        self.card, self.link = parts
        self.stream = self.card.stream()
        self.pinned: list[int] = []
        self.spec = spec
        self.pool = Pool(2, default_cpus())
        sizes = MailSizes.of(spec, MOST)
        self.mailbox = Mailbox(
            self.card, self.link, self.pool, sizes=sizes, variant=variant, stall_seconds=stall
        )
        self.alone = Pool(1, default_cpus())
        self.cases = [LayerCase.random(self.rng, spec) for _ in range(layers)]
        self.records = [self.array(case.records) for case in self.cases]
        self.tables = [ExpertTable(self.card, self.link, spec.experts) for _ in self.cases]
        self.layers = [self._layer(i) for i in range(layers)]
        self.whole = [self._bound(case, self.alone) for case in self.cases]

    def _bound(self, case: LayerCase, pool: Pool) -> CpuLayer:
        layer = CpuLayer(self.spec, pool, max_tokens=MOST)
        for e, record in enumerate(case.records):
            layer.bind(e, record.ctypes.data)
        return layer

    def _layer(self, index: int) -> HybridLayer:
        plan = plan_layer(self.spec, self.card.card, MOST)
        workspace = self.array(np.zeros(workspace_of(self.spec, plan).nbytes, np.uint8))
        table = self.tables[index]
        cuda = CudaLayer(
            self.spec,
            self.card.card,
            self.card,
            table=table.address,
            workspace=workspace.ctypes.data,
            max_tokens=MOST,
        )
        self.mailbox.attach(10 + index, self._bound(self.cases[index], self.pool))
        return HybridLayer(10 + index, cuda, table, self.mailbox)

    def place(self, residents: list[list[int]]) -> None:
        """Puts these experts of each layer on the card, and takes the others away."""
        for records, table, resident in zip(self.records, self.tables, residents, strict=True):
            for e in range(self.spec.experts):
                table.remove(e)
            for e in resident:
                table.put(e, records[e].ctypes.data)
            table.publish(self.stream)

    def array(self, data: Array) -> Array:
        """A copy that both sides can see."""
        self.pinned.append(self.link.pinned(data.nbytes + 256))
        start = self.pinned[-1] + -self.pinned[-1] % 256
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * data.nbytes).from_address(start))
        copy = raw.view(data.dtype).reshape(data.shape)
        copy[...] = data
        return copy

    def random_split(self) -> list[list[int]]:
        count = int(self.rng.integers(0, self.spec.experts + 1))
        return [list(self.rng.choice(self.spec.experts, count, replace=False)) for _ in self.layers]

    def call(self, tokens: int) -> Call:
        return Call(self, tokens)

    def close(self) -> None:
        self.mailbox.close()
        for table in self.tables:
            table.close()
        for address in self.pinned:
            self.link.free_pinned(address)


class Call:
    """One step through all layers, each on a call of its own, and what it must give."""

    def __init__(self, rig: Rig, tokens: int) -> None:
        self.rig = rig
        self.x = rig.array(random_x(rng := rig.rng, tokens, rig.spec.hidden, DType.BF16))
        routings = [random_routing(rng, tokens, rig.spec) for _ in rig.layers]
        self.routings = [(rig.array(ids), rig.array(weights)) for ids, weights in routings]
        self.outs = [rig.array(np.zeros_like(self.x)) for _ in rig.layers]
        self.want = [
            whole.run(self.x, ids, weights, DType.BF16)
            for whole, (ids, weights) in zip(rig.whole, self.routings, strict=True)
        ]

    def steps(self) -> Iterator[tuple[HybridLayer, Step]]:
        for layer, (ids, weights), out in zip(
            self.rig.layers, self.routings, self.outs, strict=True
        ):
            yield (
                layer,
                Step(
                    x=self.x.ctypes.data,
                    x_type=DType.BF16,
                    tokens=len(self.x),
                    ids=ids.ctypes.data,
                    weights=weights.ctypes.data,
                    out=out.ctypes.data,
                    out_type=DType.BF16,
                ),
            )

    @property
    def posts(self) -> int:
        return sum(layer.posts(len(self.x)) for layer in self.rig.layers)

    def enqueue(self) -> None:
        for layer, step in self.steps():
            layer.run(step, self.rig.stream)

    def run(self) -> None:
        self.rig.mailbox.announce(self.posts)
        self.enqueue()
        self.rig.card.synchronise()
        self.rig.mailbox.check()

    def assert_right(self) -> None:
        for got, want in zip(self.outs, self.want, strict=True):
            np.testing.assert_array_equal(got, want)


@contextmanager
def opened(rig: Rig) -> Iterator[Rig]:
    try:
        yield rig
    finally:
        rig.close()
