"""transformers models with moet's experts: on the CPU here, on a card in ``transformers_card``.

    with load_on_cpu(folder) as served:
        served.model.generate(...)

The model is transformers' own; its routed experts are computed by moet, bit for bit as under vLLM,
from the records that ``hybrid.load`` reads. What differs from vLLM is what is around them:
transformers' attention, and routers that round their weights to the model's type.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from moet.base import env
from moet.base.errors import UsageError
from moet.checkpoint import Checkpoint, ModelGeometry, open_checkpoint
from moet.engine import op, transformers_model
from moet.engine.live import LiveLayer
from moet.hybrid import experts, split
from moet.hybrid.heat import read_heat
from moet.hybrid.load import load, record_layout, tier_bytes
from moet.kernels.cpu import Pool
from moet.kernels.spec import LayerSpec
from moet.machine.cpu import read_cpu
from moet.tiers.api import ExpertKey, Lease
from moet.tiers.ram import RamTier

MAX_CALL_TOKENS = 4096
"""Tokens of a call that the CPU's scratch is sized for; longer ones are cut."""


class Served:
    """A model that is ready to run. ``close`` it, or use it in a with block.

    Args:
        model: transformers' module.
        checkpoint: what it was loaded from.
        layers: decoder layer -> what stands in its op's table; they live as long as this.
        resources: what ``close`` gives back.
    """

    def __init__(
        self, model: Any, checkpoint: Checkpoint, layers: Mapping[int, Any], resources: ExitStack
    ) -> None:
        self.model, self.checkpoint, self.layers = model, checkpoint, layers
        self._resources = resources

    @property
    def device(self) -> torch.device:
        """Of the model's tensors."""
        device: torch.device = self.model.device
        return device

    @property
    def calls(self) -> dict[int, int]:
        """Decoder layer -> how often moet was called for it."""
        return {index: layer.calls for index, layer in self.layers.items()}

    def close(self) -> None:
        """Gives the experts' memory back. The model must not run any more."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def default_pool(spare: int = 0) -> Pool:
    """The CPU's workers: as many as the settings say, or all cores but ``spare``."""
    return Pool(env.read().threads or max(1, read_cpu().threads - spare))


def layer_spec(geometry: ModelGeometry) -> LayerSpec:
    """What the kernels must know of a layer. transformers' routers scale their weights already."""
    return LayerSpec(
        hidden=geometry.hidden,
        intermediate=record_layout(geometry).intermediate,
        experts=geometry.experts,
        top_k=geometry.top_k,
        act=geometry.act,
        gate=geometry.gate,
        limit=geometry.limit,
        biased=geometry.biased,
    )


def read_experts(checkpoint: Checkpoint, resources: ExitStack) -> RamTier:
    """Every routed expert in an arena of its own, which closes with the resources.

    Raises:
        TierError: the memory is too small.
        BrokenCheckpoint, FormatError: a file that is not what its header says.
    """
    tier = RamTier(tier_bytes(checkpoint.geometry))
    resources.callback(tier.close)
    load(checkpoint, tier)
    return tier


def leases_of(tier: RamTier, geometry: ModelGeometry, layer: int) -> list[Lease]:
    """Leases of all experts of a layer."""
    return [tier.acquire(ExpertKey(layer, expert)) for expert in range(geometry.experts)]


def key_of(model: int, layer: int) -> str:
    """The name of a layer in its op's table."""
    return f"{model}/transformers.layers.{layer}.experts"


def load_on_cpu(folder: Path | str, *, dtype: Any = None, pool: Pool | None = None) -> Served:
    """A checkpoint folder as a transformers model on the CPU.

    Args:
        folder: as downloaded, experts in MXFP4.
        dtype: of torch, for everything but the experts; None: the config's.
        pool: the CPU's workers; None: by the settings.

    Raises:
        MoetError: see ``transformers_model.build`` and ``read_experts``.
    """
    checkpoint = open_checkpoint(folder)
    model = transformers_model.build(checkpoint, dtype, torch.device("cpu"))
    modules = transformers_model.experts_by_layer(model, checkpoint.geometry)
    pool = pool or default_pool()
    with ExitStack() as stack:
        tier = read_experts(checkpoint, stack)
        layers = _attach(modules, tier, checkpoint.geometry, pool, stack)
        return Served(model, checkpoint, layers, stack.pop_all())


def _attach(
    modules: Mapping[int, Any], tier: RamTier, geometry: ModelGeometry, pool: Pool, stack: ExitStack
) -> dict[int, LiveLayer]:
    """Binds every layer to its experts and its module to the op."""
    spec, isa, number, layers = layer_spec(geometry), env.read().isa, op.next_model(), {}
    for index, module in modules.items():
        computes = experts.plan(spec, MAX_CALL_TOKENS, pool, isa)
        stack.callback(computes.close)
        computes.bind(leases_of(tier, geometry, index))
        key = key_of(number, index)
        layers[index] = LiveLayer(key, computes)
        op.attach(key, layers[index])
        transformers_model.bind(module, _compute_on_cpu(key))
    return layers


def _compute_on_cpu(key: str) -> transformers_model.Compute:
    return lambda x, weights, ids: torch.ops.moet.routed_experts(x, weights, ids, key)


def split_of(
    geometry: ModelGeometry, share: float, heat_file: Path | str | None = None
) -> split.Split:
    """Which experts are on the card: the same number in each layer.

    Args:
        geometry: of the model.
        share: of its experts, 0 to 1.
        heat_file: recorded counts (``hybrid.heat``): the hottest; None: the first.

    Raises:
        UsageError: a share outside of 0 to 1, or a heat file of another model.
    """
    if not 0 <= share <= 1:
        hint = "0.3 puts three experts of ten there"
        raise UsageError(f"a share of {share} of the experts on the card", hint=hint)
    heat = read_heat(Path(heat_file), geometry) if heat_file is not None else None
    slots = dict.fromkeys(geometry.moe_layers, round(share * geometry.experts))
    return split.choose(heat, slots, geometry.experts)
