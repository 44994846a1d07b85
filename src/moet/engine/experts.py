"""What stands in vLLM's place of routed experts while a moet model is built.

``RoutedExperts`` asks for a method object, and the method creates the weights and computes. Ours
creates none: the experts never exist as torch parameters, so nothing of the engine can move, copy,
count or offload them. Everything else about the layer (router, shared experts, reduction over
ranks) stays the engine's, as do the quantised layers around it: a checkpoint's quantisation config
is simply not asked about routed experts.
"""

from __future__ import annotations

from typing import Any

import torch

from moet.base.errors import EngineError
from moet.engine import op, refuse, versions
from moet.engine.live import LiveLayer

_Base: Any = versions.hook("vllm.model_executor.layers.fused_moe:FusedMoEMethodBase")


class MoetMethod(_Base):  # type: ignore[misc]
    """Computes routed experts through ``torch.ops.moet.routed_experts``."""

    key = "unbound"
    is_monolithic = False
    supports_eplb = False
    topk_indices_dtype = torch.int32

    def create_weights(self, layer: Any, **_shapes: Any) -> None:
        """Creates nothing; refuses a layer that moet cannot compute.

        Raises:
            UnsupportedError: see ``refuse.layer``.
        """
        refuse.layer(layer)

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size: int, _dtype: Any, _parallel: Any
    ) -> tuple[int, int]:
        """The checkpoint's sizes as they are: moet pads inside its own tiles."""
        return hidden_size, intermediate_size

    def get_fused_moe_quant_config(self, _layer: Any) -> None:
        """None: there is no kernel of the engine to configure."""

    def apply(
        self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, **_shared_experts: Any
    ) -> Any:
        """x [T, H], weights [T, K], ids [T, K] -> [T, H]: this rank's part of the sum."""
        del layer  # it owns no weights
        return torch.ops.moet.routed_experts(x, topk_weights, topk_ids, self.key)


def moet_class(stock: Any) -> Any:
    """The stock class of routed experts with moet's method in it, and no way to load a tensor."""

    class MoetRoutedExperts(stock):  # type: ignore[misc]
        """``stock``, computed by moet."""

        def _get_quant_method(self, _prefix: str, _quant_config: Any, moe_config: Any) -> Any:
            return MoetMethod(moe_config)

        def load_weights(self, weights: Any) -> Any:
            """Refuses: a tensor that arrives here has slipped through moet's loader.

            Raises:
                EngineError: always, if there is a tensor.
            """
            for name, _tensor in weights:
                raise EngineError(
                    f"the engine wants to load {self.layer_name}.{name} into torch",
                    hint="moet's name map misses this tensor; please report the checkpoint",
                )
            return ()

        def bind_op(self, model: int, live: LiveLayer) -> None:
            """Lets this layer's forward passes go to ``live``."""
            self.moet_layer = live
            self.quant_method.key = f"{model}/{self.layer_name}"
            op.attach(self.quant_method.key, live)

    MoetRoutedExperts.__qualname__ = MoetRoutedExperts.__name__ = f"Moet{stock.__name__}"
    return MoetRoutedExperts


def routed_layers(model: Any) -> list[Any]:
    """All layers of a torch model that were built by ``moet_class``."""
    return [m for m in model.modules() if isinstance(getattr(m, "quant_method", None), MoetMethod)]
