"""From a built vLLM model and a checkpoint to layers that are bound to their experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moet.base import env, log
from moet.base.errors import EngineError
from moet.base.units import format_bytes, format_rate, format_seconds
from moet.checkpoint import Checkpoint, ModelGeometry
from moet.engine import cores, live, refuse, settings, versions
from moet.engine.experts import routed_layers
from moet.engine.heartbeat import Page, Rank
from moet.engine.live import LiveLayer
from moet.engine.tell import own_page
from moet.hybrid import experts
from moet.hybrid.load import Progress, load, record_layout, tier_bytes
from moet.hybrid.reference import ReferenceExperts
from moet.kernels.cpu import Pool
from moet.kernels.spec import LayerSpec
from moet.tiers.api import ExpertKey
from moet.tiers.ram import RamTier

_log = log.get("engine")

LOG_SECONDS = 5.0

Computer = experts.Experts | ReferenceExperts


@dataclass(frozen=True, kw_only=True)
class Share:
    """What this worker computes: slice ``rank`` of ``world``, on ``cpus``; its heartbeat line."""

    rank: int
    world: int
    cpus: tuple[int, ...]
    line: Rank | None


def share_of(config: Any, routed: Any, page: Page | None) -> Share:
    """The share of this process, from a vLLM config and one of its MoE layers."""
    moe = routed.moe_config
    line = page.rank(config.parallel_config.rank) if page else None
    if line:
        line.claim()
    cpus = cores.of_rank(moe.tp_rank, moe.tp_size)
    return Share(rank=moe.tp_rank, world=moe.tp_size, cpus=cpus, line=line)


def layers_by_index(model: Any, geometry: ModelGeometry) -> dict[int, Any]:
    """The model's MoE layers by decoder layer, checked against the checkpoint's config.

    Raises:
        EngineError: the engine built other layers than the checkpoint has.
    """
    routed = routed_layers(model)
    indices = [versions.layer_index(layer.layer_name) for layer in routed]
    live.require_all_bound(geometry.moe_layers, indices)
    for layer in routed:
        refuse.mismatch(layer, geometry)
    return dict(zip(indices, routed, strict=True))


def take_scale(runner: Any) -> float | None:
    """The factor on a layer's output, which moet applies before the one rounding; taken from the
    engine's runner, which would apply it after. fp16 with shared experts stays the engine's: there
    it divides the shared part instead, and the model multiplies later."""
    factor = float(runner.routed_scaling_factor)
    halves = runner.moe_config.in_dtype == torch.float16 and runner.shared_experts is not None
    if factor == 1.0 or halves:
        return None
    runner.routed_scaling_factor = 1.0
    return factor


def output_scales(model: Any) -> Mapping[str, float | None]:
    """``take_scale`` of every MoE layer, by the layer's name."""
    runners: list[Any] = [m for m in model.modules() if isinstance(m, versions.runner_class())]
    return {runner.layer_name: take_scale(runner) for runner in runners}


def layer_spec(geometry: ModelGeometry, share: Share, scale: float | None) -> LayerSpec:
    """What the kernels must know of a layer of this rank."""
    return LayerSpec(
        hidden=geometry.hidden,
        intermediate=record_layout(geometry, share.rank, share.world).intermediate,
        experts=geometry.experts,
        top_k=geometry.top_k,
        act=geometry.act,
        gate=geometry.gate,
        limit=geometry.limit,
        biased=geometry.biased,
        output_scale=scale,
    )


def computer(config: Any, share: Share) -> Callable[[LayerSpec], Computer]:
    """Makes the thing that computes a layer: kernels on one pool, or the reference.

    Raises:
        KernelError: MOET_ISA names an instruction set that is not there.
    """
    asked = env.read()
    if settings.read(config.additional_config).arithmetic is settings.Arithmetic.REFERENCE:
        return ReferenceExperts
    pool = Pool(cores.threads(share.cpus, asked.threads, share.world), share.cpus)
    if share.line:
        pool.set_heartbeat(share.line.address)
    most = config.scheduler_config.max_num_batched_tokens
    _log.info("CPU tier: %d threads on CPUs %s", pool.threads, list(pool.cpus))
    return lambda spec: experts.plan(spec, most, pool, asked.isa)


def _tell(share: Share) -> Callable[[Progress], None]:
    said = 0.0

    def progress(now: Progress) -> None:
        nonlocal said
        if share.line:
            share.line.loading(now.done, now.total)
            share.line.moved()
        if now.remaining and now.seconds - said >= LOG_SECONDS:
            said = now.seconds
            done, total = format_bytes(now.done), format_bytes(now.total)
            left = format_seconds(now.remaining)
            _log.info("experts: %s of %s, %s, %s left", done, total, format_rate(now.rate), left)

    return progress


def fill(checkpoint: Checkpoint, share: Share) -> RamTier:
    """An arena with every expert of this rank.

    Raises:
        TierError: the memory is too small.
        BrokenCheckpoint, FormatError: a file that is not what its header says.
    """
    tier = RamTier(tier_bytes(checkpoint.geometry, share.rank, share.world))
    part = {"rank": share.rank, "world": share.world, "cpus": share.cpus}
    load(checkpoint, tier, progress=_tell(share), **part)  # type: ignore[arg-type]
    return tier


def bound_layer(
    name: str, computes: Computer, tier: RamTier, index: int, share: Share
) -> LiveLayer:
    """A layer that has all its experts.

    Raises:
        EngineError: one is missing.
    """
    wanted = range(computes.spec.experts)
    computes.bind(tier.acquire(ExpertKey(index, expert)) for expert in wanted)
    if computes.bound != len(wanted):
        what = f"{name}: {computes.bound} of {len(wanted)} experts are bound"
        raise EngineError(what, hint="this is a fault of moet; please report it")
    counts_itself = isinstance(computes, experts.Experts)
    return LiveLayer(name, computes, share.line.beat if share.line and not counts_itself else None)


def load_and_bind(model: Any, checkpoint: Checkpoint, config: Any, number: int) -> None:
    """Reads the experts of this rank and binds every MoE layer of ``model`` to its own.

    Args:
        model: a torch module, built with ``experts.moet_class``.
        checkpoint: what it was built from.
        config: the VllmConfig.
        number: of the model in this process; part of the layers' keys.

    Raises:
        EngineError: the engine built other layers than the checkpoint has.
        MoetError: of any room below (no memory, a broken file, no such instruction set).
    """
    geometry = checkpoint.geometry
    layers = layers_by_index(model, geometry)
    share = share_of(config, next(iter(layers.values())), own_page())
    make = computer(config, share)
    tier = fill(checkpoint, share)
    scales = output_scales(model)
    bound = []
    for index, layer in layers.items():
        name = layer.layer_name
        computes = make(layer_spec(geometry, share, scales[name]))
        bound.append(bound_layer(name, computes, tier, index, share))
        layer.bind_op(number, bound[-1])
    live.check_after_first_pass(model, bound)
