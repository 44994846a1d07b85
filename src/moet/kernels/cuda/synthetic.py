"""Experts made of random bytes, as records: what exams and benches of the kernels run on."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from moet.formats.tiling import GROUP_BYTES, TILE_BYTES
from moet.kernels.spec import LayerSpec


def random_records(
    rng: np.random.Generator, spec: LayerSpec, scales: tuple[int, int]
) -> NDArray[np.uint8]:
    """Records of all experts as random bytes, uint8 [E, record_bytes], page-aligned."""
    layout = spec.layout
    pages = mmap.mmap(-1, spec.experts * layout.record_bytes)
    records = np.frombuffer(pages, np.uint8).reshape(spec.experts, -1)
    groups_end = layout.gate_bias
    for record in records:
        groups = record[:groups_end].reshape(-1, GROUP_BYTES)
        codes = 4 * TILE_BYTES
        groups[:, :codes] = rng.integers(0, 256, (len(groups), codes), np.uint8)
        groups[:, codes:] = rng.integers(*scales, (len(groups), GROUP_BYTES - codes), np.uint8)
        if spec.biased:
            biases = record[groups_end : layout.payload_bytes].view(np.float32)
            biases[:] = rng.standard_normal(biases.size)
    return records
