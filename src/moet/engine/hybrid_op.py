"""``torch.ops.moet.hybrid_experts``: a MoE layer on a card and its host's CPUs, on torch's stream.

The same contract as ``moet::routed_experts`` (op.py), for tensors of the card. It enqueues and
returns: nothing is waited for, and the only memory is the output's, from torch's allocator; so a
step can be captured. An engine with work of its own for the meantime (a shared expert) calls the
halves instead:

    out = torch.ops.moet.hybrid_start(x, weights, ids, layer)     the CPU and the card begin
    torch.ops.moet.hybrid_finish(out, weights, ids, layer)        out is filled

One layer of a mailbox at a time: its second half comes before the first half of the next. Who
announces a step and checks it (``Mailbox.announce``, ``Mailbox.check``) is who runs the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from moet.base.errors import EngineError, MoetError
from moet.engine.op import DTYPES
from moet.engine.tell import tell
from moet.kernels.cuda.layer import Step
from moet.kernels.spec import LayerSpec

_ALIGNMENT = 16
_IDS = (torch.int32, torch.int64)

_LAYERS: WeakValueDictionary[str, CardLayer] = WeakValueDictionary()
_LIBRARY = torch.library.Library("moet", "FRAGMENT")
_SCHEMAS = (
    "hybrid_experts(Tensor x, Tensor weights, Tensor ids, str layer) -> Tensor",
    "hybrid_start(Tensor x, Tensor weights, Tensor ids, str layer) -> Tensor",
    "hybrid_finish(Tensor(a!) out, Tensor weights, Tensor ids, str layer) -> ()",
)


class Halves(Protocol):
    """What computes a layer: ``hybrid.step.HybridLayer``."""

    spec: LayerSpec
    most_tokens: int

    def start(self, step: Step, stream: int) -> None:
        """Enqueues the first half."""

    def finish(self, step: Step, stream: int) -> None:
        """Enqueues the second half."""

    def run(self, step: Step, stream: int) -> None:
        """Both halves, for any number of tokens."""


@dataclass(eq=False)
class CardLayer:
    """One MoE layer of a model, on a card.

    Attributes:
        name: the engine's.
        halves: computes it.
        device: of the tensors. ``cpu`` only where the CPU stands in for a card, in tests.
        calls: times that it was enqueued; a replayed graph does not pass here.
        started: tokens of the step whose second half is to come; None: none is.
    """

    name: str
    halves: Halves
    device: torch.device
    calls: int = 0
    started: int | None = None

    def enqueue(self, part: Callable[[Step, int], None], step: Step) -> None:
        """One half or both, on torch's current stream; what goes wrong is told on the page."""
        try:
            part(step, stream_of(self.device))
        except MoetError as error:
            tell(error)
            raise

    def split_at(self, tokens: int) -> int:
        """Tokens of a call that ``start`` also finishes: all steps of it but the last."""
        most = self.halves.most_tokens
        return (tokens - 1) // most * most


def attach(key: str, layer: CardLayer) -> None:
    """Makes the ops compute ``key`` with ``layer``, which the caller keeps alive."""
    _LAYERS[key] = layer


def stream_of(device: torch.device) -> int:
    """The handle of torch's current stream there; 0 where the CPU stands in for the card."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def _find(key: str) -> CardLayer:
    layer = _LAYERS.get(key)
    if layer is None:
        raise EngineError(
            f"{key} runs before moet has loaded its experts",
            hint="this is a fault of moet; please report it with the start-up log",
        )
    return layer


def _require(layer: CardLayer, x: Any, weights: Any, ids: Any) -> None:
    """Raw addresses follow: what an engine pads or trims must end here, not in foreign memory."""
    spec, tokens = layer.halves.spec, x.shape[0]
    given = [tuple(t.shape) for t in (x, weights, ids)]
    wanted = [(tokens, spec.hidden), (tokens, spec.top_k), (tokens, spec.top_k)]
    types = x.dtype in DTYPES and weights.dtype in DTYPES and ids.dtype in _IDS
    devices = [t.device for t in (x, weights, ids)]
    if given == wanted and types and devices == [layer.device] * 3:
        return
    told = [f"{n} {s} {t.dtype} on {t.device}" for n, s, t in zip(
        ("x", "weights", "ids"), given, (x, weights, ids), strict=True)]  # fmt: skip
    raise EngineError(
        f"{layer.name} got {', '.join(told)}; it is made for {wanted[0]} and {wanted[1]} in float32"
        f", bfloat16 or float16 and {wanted[2]} in int32 or int64, all on {layer.device}",
        hint="this version of the engine shapes its calls in a way that moet does not cover",
    )


def _raw(x: Any, weights: Any, ids: Any) -> tuple[Any, Any, Any]:
    """The tensors as the kernels read them; those that are so already are passed on."""
    x = x.contiguous()
    x = x.clone() if x.data_ptr() % _ALIGNMENT else x
    return x, weights.float().contiguous(), ids.int().contiguous()


def _step(x: Any, weights: Any, ids: Any, out: Any) -> Step:
    kind = DTYPES[out.dtype]
    return Step(
        x=x.data_ptr(),
        x_type=kind,
        tokens=out.shape[0],
        ids=ids.data_ptr(),
        weights=weights.data_ptr(),
        out=out.data_ptr(),
        out_type=kind,
    )


def _experts(x: Any, weights: Any, ids: Any, layer: str) -> Any:
    """x [T, H], weights [T, K], ids [T, K] (negative = empty slot) -> [T, H] in x's type."""
    found = _find(layer)
    _require(found, x, weights, ids)
    x, weights, ids = _raw(x, weights, ids)
    out = torch.empty_like(x)
    found.calls += 1
    if x.shape[0]:
        found.enqueue(found.halves.run, _step(x, weights, ids, out))
    return out


def _start(x: Any, weights: Any, ids: Any, layer: str) -> Any:
    """As ``_experts``; the output's last step is not there before ``_finish``."""
    found = _find(layer)
    _require(found, x, weights, ids)
    x, weights, ids = _raw(x, weights, ids)
    out = torch.empty_like(x)
    found.calls += 1
    if x.shape[0]:
        at = found.split_at(x.shape[0])
        if at:
            found.enqueue(found.halves.run, _step(x[:at], weights[:at], ids[:at], out[:at]))
        found.enqueue(found.halves.start, _step(x[at:], weights[at:], ids[at:], out[at:]))
    found.started = x.shape[0]
    return out


def _finish(out: Any, weights: Any, ids: Any, layer: str) -> None:
    """Fills what ``_start`` gave; weights and ids are those of the start."""
    found = _find(layer)
    _require(found, out, weights, ids)
    started, found.started = found.started, None
    if started != out.shape[0] or not out.is_contiguous():
        had = "nothing" if started is None else f"a call of {started} tokens"
        raise EngineError(
            f"{found.name}: the end of a call of {out.shape[0]} tokens, where {had} had begun",
            hint="call hybrid_finish once after each hybrid_start, with its output",
        )
    if out.shape[0]:
        at = found.split_at(out.shape[0])
        _, weights, ids = _raw(out, weights, ids)
        found.enqueue(found.halves.finish, _step(out[at:], weights[at:], ids[at:], out[at:]))


def _fake(x: Any, weights: Any, ids: Any, layer: str) -> Any:
    return x.new_empty(x.shape)


def _fake_finish(out: Any, weights: Any, ids: Any, layer: str) -> None:
    return None


for _schema, _real, _shape in zip(
    _SCHEMAS, (_experts, _start, _finish), (_fake, _fake, _fake_finish), strict=True
):
    _name = _schema.split("(", 1)[0]
    _LIBRARY.define(_schema, tags=(torch.Tag.needs_fixed_stride_order,))
    for _backend in ("CUDA", "CPU"):
        _LIBRARY.impl(_name, _real, _backend)
    _LIBRARY._register_fake(_name, _shape)
