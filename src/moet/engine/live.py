"""Proof that moet computes what it says: every MoE layer counts its calls, and somebody looks.

A plugin that was loaded but never reached would serve a model without experts, or somebody else's.
So each layer counts, and after the model's first forward pass (the profiling run, or the first
step where the engine profiles nothing) a layer whose counter stands at zero ends the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moet.base import log
from moet.base.errors import EngineError
from moet.engine.tell import telling
from moet.kernels.spec import DType, LayerSpec


class Runnable(Protocol):
    """What computes one layer: ``hybrid.experts.Experts`` or ``hybrid.reference``."""

    spec: LayerSpec

    def run(self, *, x: int, dtype: DType, tokens: int, weights: int, ids: int, out: int) -> None:
        """See ``hybrid.experts.Experts.run``."""


@dataclass(eq=False)
class LiveLayer:
    """One MoE layer of the engine, bound to its experts.

    Attributes:
        name: vLLM's name of the layer.
        experts: the bound experts; computes the layer.
        beat: counts beginnings and ends of steps for the watchdog, where ``experts`` does not.
        calls: forward passes that went through here.
    """

    name: str
    experts: Runnable
    beat: Callable[[], None] | None = None
    calls: int = 0

    def run(self, **raw: Any) -> None:
        """Passes raw addresses on (``Experts.run``) and counts."""
        self.calls += 1
        if self.beat is None:
            self.experts.run(**raw)
            return
        self.beat()
        try:
            self.experts.run(**raw)
        finally:
            self.beat()


def require_all_bound(expected: Sequence[int], bound: Sequence[int]) -> None:
    """Each MoE layer of the checkpoint must have been built and bound exactly once.

    Raises:
        EngineError: names the layers that are missing or too many.
    """
    if sorted(expected) == sorted(bound):
        return
    missing, strange = sorted(set(expected) - set(bound)), sorted(set(bound) - set(expected))
    raise EngineError(
        f"the checkpoint has MoE layers {list(expected)}, the engine built {sorted(bound)}: "
        f"missing {missing}, unknown {strange}",
        hint="this model is built in a way that moet does not cover; serve it without moet",
    )


def require_all_called(layers: Sequence[LiveLayer]) -> None:
    """Each layer must have computed something by now.

    Raises:
        EngineError: names the layers that have not.
    """
    idle = [layer.name for layer in layers if layer.calls == 0]
    if idle:
        raise EngineError(
            f"the engine ran a step without moet's experts in {', '.join(idle)}",
            hint="another plugin may have replaced the MoE layers: set VLLM_PLUGINS=moet",
        )


def check_after_first_pass(model: Any, layers: Sequence[LiveLayer]) -> None:
    """Has ``model`` (a torch module) look at the counters once, after its first forward pass."""

    def look(_module: Any, _args: Any, _output: Any) -> None:
        handle.remove()
        with telling():
            require_all_called(layers)
        log.get("engine").info("all %d MoE layers run through moet", len(layers))

    handle = model.register_forward_hook(look)
