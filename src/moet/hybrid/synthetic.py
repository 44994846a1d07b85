"""A model's worth of random experts in host memory, made at the speed of memory: what exams and
benches of the hybrid step run on.

Every record is its own memory, so that no cache helps: rotations, by whole groups of blocks, of a
few random records. A rotation has the bytes of another expert as good as any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import TierError
from moet.formats.tiling import GROUP_BYTES
from moet.kernels.cpu import CpuLayer
from moet.kernels.cuda.synthetic import random_records
from moet.kernels.spec import LayerSpec
from moet.machine.cpu import read_cpu
from moet.tiers.api import ExpertKey, Lease
from moet.tiers.ram import RamTier

SCALES: Final = (118, 127)
"""Scale bytes as trained models have them."""

_FEW: Final = 4


class SyntheticExperts:
    """All experts of some layers, in a RAM tier of their own.

    Args:
        specs: the layers by index.
        seed: gives the same experts again.
        progress: told (done, all) experts.

    Raises:
        TierError: they do not fit into memory; before anything is written.
    """

    def __init__(
        self,
        specs: Mapping[int, LayerSpec],
        *,
        seed: int = 0,
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        self.specs = dict(specs)
        self.nbytes = sum(s.experts * s.layout.record_bytes for s in specs.values())
        try:
            self.tier = RamTier(self.nbytes, populate=False)  # the writers fault it in, all at once
        except TierError as error:
            hint = "take fewer experts or layers: --experts 128, --layers 2"
            raise TierError(str(error), hint=hint) from error
        rng = np.random.default_rng(seed)
        few = {spec: _few_records(rng, spec) for spec in dict.fromkeys(self.specs.values())}
        keys = [ExpertKey(i, e) for i, spec in self.specs.items() for e in range(spec.experts)]
        self.leases: dict[ExpertKey, Lease] = {}
        with ThreadPoolExecutor(read_cpu().threads) as writers:
            written = writers.map(lambda key: self._write(key, few[self.specs[key.layer]]), keys)
            for done, (key, lease) in enumerate(zip(keys, written, strict=True), start=1):
                self.leases[key] = lease
                progress(done, len(keys))

    def _write(self, key: ExpertKey, few: NDArray[np.uint8]) -> Lease:
        spec = self.specs[key.layer]
        source, end = few[key.expert % len(few)], spec.layout.gate_bias
        number = key.layer * spec.experts + key.expert
        cut = number * GROUP_BYTES % end
        with self.tier.reserve(key, len(source)) as reservation:
            record = reservation.buffer
            np.copyto(record[cut:end], source[: end - cut])
            np.copyto(record[:cut], source[end - cut : end])
            np.copyto(record[end:], source[end:])
        return self.tier.acquire(key)

    def bind(self, index: int, layer: CpuLayer) -> None:
        """Binds a layer's experts to its CPU kernels, which must not outlive this object."""
        for expert in range(self.specs[index].experts):
            layer.bind(expert, self.leases[ExpertKey(index, expert)].address)

    def borrow(self) -> list[Lease]:
        """A lease of every expert, for somebody who will release them."""
        return [self.tier.acquire(key) for key in self.leases]

    def close(self) -> None:
        """Gives the memory back.

        Raises:
            TierError: a borrowed lease is still held.
        """
        for lease in self.leases.values():
            lease.release()
        self.leases.clear()
        self.tier.close()


def _few_records(rng: np.random.Generator, spec: LayerSpec) -> NDArray[np.uint8]:
    few = min(_FEW, spec.experts)
    return random_records(rng, replace(spec, experts=few, top_k=1), SCALES)
