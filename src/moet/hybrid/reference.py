"""The slow twin of ``experts.Experts``: the same bind and run, computed by the numpy reference.

It reads the experts out of the same leases, so it judges the repacking too. What it is for:
``moet verify``, and serving a small model with arithmetic that anybody can read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moet.formats.tiling import ExpertWeights, read_expert
from moet.kernels.reference import moe_layer
from moet.kernels.rounding import F32, round_output, widen_bf16
from moet.kernels.spec import DType, LayerSpec
from moet.tiers.api import Lease


def at(address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array over raw memory that the caller keeps alive."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype).reshape(shape)


def _widened(address: int, shape: tuple[int, ...], dtype: DType) -> F32:
    if dtype is DType.BF16:
        return widen_bf16(at(address, shape, np.uint16))
    return at(address, shape, np.float16 if dtype is DType.F16 else np.float32).astype(np.float32)


class _Leased(Mapping[int, ExpertWeights]):
    """Experts, unpacked from their records each time they are asked for."""

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec
        self.leases: dict[int, Lease] = {}

    def __getitem__(self, expert: int) -> ExpertWeights:
        return read_expert(self.spec.layout, self.leases[expert].view())

    def __iter__(self) -> Iterator[int]:
        return iter(self.leases)

    def __len__(self) -> int:
        return len(self.leases)


class ReferenceExperts:
    """The routed experts of one layer, computed by ``kernels.reference``."""

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec
        self._experts = _Leased(spec)

    def bind(self, leases: Iterable[Lease]) -> None:
        """Takes over leases of this layer's experts; they are held as long as this object."""
        self._experts.leases.update({lease.key.expert: lease for lease in leases})

    @property
    def bound(self) -> int:
        """Experts that ``run`` can use."""
        return len(self._experts)

    def run(self, *, x: int, dtype: DType, tokens: int, weights: int, ids: int, out: int) -> None:
        """As ``experts.Experts.run``."""
        hidden, slots = self.spec.hidden, (tokens, self.spec.top_k)
        if tokens == 0:
            return
        result = moe_layer(
            self.spec,
            _widened(x, (tokens, hidden), dtype),
            at(ids, slots, np.int32),
            at(weights, slots, np.float32),
            self._experts,
        )
        stored = round_output(result, dtype)
        at(out, (tokens, hidden), stored.dtype)[:] = stored
