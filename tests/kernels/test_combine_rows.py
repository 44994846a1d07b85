"""Rows group by group, then their combine: the bits of a step that does all of it at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moet.base.errors import KernelError
from moet.kernels.cpu import CpuLayer, Pool, isa_available
from moet.kernels.spec import ActFormat, DType, LayerSpec
from moet.verify.cases import LayerCase, random_routing, random_x

KINDS = {np.float32: DType.F32, np.uint16: DType.BF16, np.float16: DType.F16}


def spec(act: ActFormat, hidden: int = 96, scale: float | None = None) -> LayerSpec:
    return LayerSpec(
        hidden=hidden, intermediate=64, experts=7, top_k=3, act=act, output_scale=scale
    )


def in_groups(
    layer: CpuLayer,
    x: NDArray[Any],
    ids: NDArray[np.int32],
    weights: NDArray[np.float32],
    groups: list[NDArray[np.int64]],
) -> NDArray[Any]:
    kind = np.uint16 if layer.spec.rows_bf16 else np.float32
    rows = np.full((*ids.shape, layer.spec.hidden), 0x7FC0, kind)  # skipped rows: never looked at
    x_type = KINDS[x.dtype.type]
    for group in groups:
        only = np.where(np.isin(ids, group), ids, -1).astype(np.int32)
        layer.run_rows_at(
            x=x.ctypes.data,
            x_type=x_type,
            tokens=len(x),
            ids=only.ctypes.data,
            slots=ids.shape[1],
            rows=rows.ctypes.data,
        )
    out = np.empty_like(x)
    layer.combine_rows_at(
        rows=rows.ctypes.data,
        tokens=len(x),
        ids=ids.ctypes.data,
        weights=weights.ctypes.data,
        slots=ids.shape[1],
        out=out.ctypes.data,
        out_type=x_type,
    )
    return out


@pytest.mark.parametrize("isa", isa_available())
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("act", ActFormat)
def test_any_grouping_has_the_same_bits(isa: str, dtype: DType, act: ActFormat) -> None:
    rng = np.random.default_rng(act * 8 + dtype)
    for hidden, tokens, scale in ((96, 1, None), (1056, 5, 0.7), (32, 40, None)):
        case = LayerCase.random(rng, spec(act, hidden, scale))
        layer = case.layer(Pool(2), isa, max_tokens=16)  # 40 tokens are cut into steps
        x = random_x(rng, tokens, hidden, dtype, wild=True)
        ids, weights = random_routing(rng, tokens, case.spec)
        whole = layer.run(x, ids, weights, dtype)
        for cuts in ([], [3], [1, 2, 3, 4, 5, 6]):
            groups = np.split(rng.permutation(7), cuts)
            assert in_groups(layer, x, ids, weights, groups).tobytes() == whole.tobytes()


def test_more_tokens_than_a_job_holds_items() -> None:
    """65535 items are the most of a slot: with three parts a token, 30000 tokens are two jobs."""
    rng = np.random.default_rng(1)
    shape = LayerSpec(hidden=1056, intermediate=32, experts=2, top_k=1, act=ActFormat.MXINT8)
    layer = CpuLayer(shape, Pool(2), max_tokens=1)
    rows = rng.integers(0x3F00, 0x4100, (30000, 1, 1056), np.uint16)
    ids = rng.integers(-1, 2, (30000, 1), np.int32)
    weights = np.ones((30000, 1), np.float32)
    out = np.empty((30000, 1056), np.uint16)
    layer.combine_rows_at(
        rows=rows.ctypes.data,
        tokens=30000,
        ids=ids.ctypes.data,
        weights=weights.ctypes.data,
        slots=1,
        out=out.ctypes.data,
        out_type=DType.BF16,
    )
    assert np.array_equal(out, np.where(ids >= 0, rows[:, 0], 0))


def test_what_cannot_be_is_refused() -> None:
    layer = CpuLayer(spec(ActFormat.MXINT8), Pool(1))
    good: dict[str, Any] = dict.fromkeys(("rows", "ids", "weights", "out"), 64)
    good |= {"tokens": 1, "slots": 3, "out_type": DType.BF16}
    for field, value in (("slots", 4), ("slots", 0), ("rows", 0), ("weights", 3), ("tokens", -1)):
        with pytest.raises(KernelError):
            layer.combine_rows_at(**good | {field: value})
    layer.combine_rows_at(**good | {"tokens": 0})
