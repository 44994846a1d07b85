"""``torch.ops.moet.routed_experts``: where torch's graph ends and moet's arithmetic begins.

On the CPU vLLM calls a layer's method inside the traced graph, so the op is opaque: Dynamo sees a
tensor of the input's shape come out (the fake) and nothing of what happens in between. The layer
travels as a string, because a graph cannot hold an object; the table below turns it back. The table
is weak: a layer lives as long as the model that it belongs to.
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch

from moet.base.errors import EngineError, MoetError
from moet.engine.live import LiveLayer
from moet.engine.tell import tell
from moet.kernels.spec import DType

DTYPES = {torch.float32: DType.F32, torch.bfloat16: DType.BF16, torch.float16: DType.F16}

_LAYERS: WeakValueDictionary[str, LiveLayer] = WeakValueDictionary()
_MODELS = itertools.count()
_LIBRARY = torch.library.Library("moet", "FRAGMENT")
_SCHEMA = "routed_experts(Tensor x, Tensor weights, Tensor ids, str layer) -> Tensor"


def next_model() -> int:
    """A number for a model that is about to be built; 0 in a process that serves one."""
    return next(_MODELS)


def attach(key: str, layer: LiveLayer) -> None:
    """Makes the op compute ``key`` with ``layer``, which the caller keeps alive."""
    _LAYERS[key] = layer


def _require_shapes(live: LiveLayer, x: Any, weights: Any, ids: Any) -> None:
    """Raw addresses follow: what an engine pads or trims must end here, not in foreign memory."""
    spec = live.experts.spec
    routed = (x.shape[0], spec.top_k)
    given = [(tuple(t.shape), t.device.type) for t in (x, weights, ids)]
    wanted = [(shape, "cpu") for shape in ((x.shape[0], spec.hidden), routed, routed)]
    if given != wanted or x.dtype not in DTYPES:
        raise EngineError(
            f"{live.name} got x {given[0]} {x.dtype}, weights {given[1]}, ids {given[2]}; "
            f"it is made for {wanted[0]}, {wanted[1]}, {wanted[2]} in float32, bfloat16 or float16",
            hint="this version of the engine shapes its calls in a way that moet does not cover",
        )


def _routed_experts(x: Any, weights: Any, ids: Any, layer: str) -> Any:
    """x [T, H], weights fp32 [T, K], ids int32 [T, K] -> the combined output [T, H] in x's type."""
    live = _LAYERS.get(layer)
    if live is None:
        raise EngineError(
            f"{layer} runs before moet has loaded its experts",
            hint="this is a fault of moet; please report it with the start-up log",
        )
    _require_shapes(live, x, weights, ids)
    x, weights, ids = x.contiguous(), weights.float().contiguous(), ids.int().contiguous()
    out = torch.empty_like(x)
    try:
        live.run(
            x=x.data_ptr(),
            dtype=DTYPES[x.dtype],
            tokens=x.shape[0],
            weights=weights.data_ptr(),
            ids=ids.data_ptr(),
            out=out.data_ptr(),
        )
    except MoetError as error:
        tell(error)
        raise
    return out


def _fake(x: Any, weights: Any, ids: Any, layer: str) -> Any:
    return x.new_empty(x.shape)


_LIBRARY.define(_SCHEMA, tags=(torch.Tag.needs_fixed_stride_order,))
_LIBRARY.impl("routed_experts", _routed_experts, "CPU")
_LIBRARY._register_fake("routed_experts", _fake)
