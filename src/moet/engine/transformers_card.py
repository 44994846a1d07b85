"""transformers models whose routed experts are on a card and on its host's CPUs.

    with load_on_card(folder, share=0.3) as served:
        served.model.generate(...)

Each forward pass is a step: a hook before it announces its posts to the CPU's workers, a hook after
it waits for the card and checks the mailbox, so an answer that did not come is an error before
anybody sees a logit. A pass that is captured does neither: `CardServed.replay` does both, for every
replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moet.base import env
from moet.base.errors import EngineError
from moet.checkpoint import Checkpoint, ModelGeometry, open_checkpoint
from moet.engine import hybrid_op, op, transformers_adapter, transformers_model
from moet.engine.hybrid_op import CardLayer
from moet.engine.transformers_adapter import Served
from moet.hybrid.card import MAX_TOKENS, CardExperts, HybridLink
from moet.hybrid.mailbox import STALL_SECONDS, Variant
from moet.hybrid.probe import ProbeCard, choose
from moet.hybrid.split import Split
from moet.kernels.cpu import Pool
from moet.tiers.memory import CardMemory
from moet.tiers.ram import RamTier


@dataclass(frozen=True, kw_only=True)
class CardAccess:
    """Everything of one card that the experts need.

    Attributes:
        gpu: kernels and memory.
        link: its host link.
        memory: for uploads.
        device: torch's name of it.
        close: gives what is its own back.
    """

    gpu: ProbeCard
    link: HybridLink
    memory: CardMemory
    device: torch.device
    close: Callable[[], None] = lambda: None


def open_card(ordinal: int = 0) -> CardAccess:
    """A GPU, by torch's number, its kernels compiled or found in the cache.

    Raises:
        EngineError: torch sees no such GPU.
        MachineError, KernelError: the bindings are missing, or the kernels do not run on it.
    """
    from moet.kernels.cuda.gpu import CACHE_FOLDER, Gpu
    from moet.kernels.cuda.link import Link
    from moet.kernels.cuda.memory import CudaMemory

    if ordinal >= torch.cuda.device_count():
        what = f"torch sees {torch.cuda.device_count()} GPUs, and not number {ordinal}"
        raise EngineError(what, hint="load_on_cpu needs none; look at CUDA_VISIBLE_DEVICES")
    device = torch.device("cuda", ordinal)
    torch.zeros(1, device=device)  # torch makes the primary context first, which is then shared
    gpu = Gpu(ordinal, env.read().cache_dir.expanduser() / CACHE_FOLDER)
    memory = CudaMemory(ordinal)
    return CardAccess(
        gpu=gpu, link=Link(gpu), memory=memory, device=device, close=memory.close
    )  # fmt: skip


class CardServed(Served):
    """A model whose experts are on a card and on the CPU; made by `load_on_card`.

    Attributes:
        experts: the layers, the mailbox, the card's tier.
    """

    experts: CardExperts

    def __init__(
        self,
        model: Any,
        checkpoint: Checkpoint,
        layers: Mapping[int, CardLayer],
        resources: ExitStack,
        *,
        experts: CardExperts,
        card: CardAccess,
    ) -> None:
        super().__init__(model, checkpoint, layers, resources)
        self.experts, self._card = experts, card
        for hook in (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ):
            resources.callback(hook.remove)
        resources.callback(self._synchronise)

    def place(self, split: Split) -> int:
        """Makes the card hold these experts and no others; no bit of any answer changes.

        Returns:
            Bytes uploaded.

        Raises:
            TierError: they do not fit.
        """
        return self.experts.place(split, hybrid_op.stream_of(self._card.device))

    # ---- steps

    def _before(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._capturing():
            tokens = _tokens_of(args, kwargs)
            posts = sum(layer.posts(tokens) for layer in self.experts.layers.values())
            self.experts.mailbox.announce(posts)

    def _after(self, _module: Any, _args: Any, output: Any) -> None:
        if self._capturing():
            return
        self._synchronise()
        if output is None:  # the pass has raised: some of its posts may never come
            self.experts.mailbox.settle()
        else:
            self.experts.mailbox.check()

    def _capturing(self) -> bool:
        on_card = self._card.device.type == "cuda"
        return on_card and bool(torch.cuda.is_current_stream_capturing())

    def _synchronise(self) -> None:
        if self._card.device.type == "cuda":
            torch.cuda.current_stream(self._card.device).synchronize()

    @contextmanager
    def capturing(self) -> Iterator[list[int]]:
        """Around the capture of a pass; gives the list that `replay` wants. Nothing is uploaded
        meanwhile."""
        with self._card.memory.paused(), self.experts.mailbox.recording() as posts:
            yield posts

    def replay(self, graph: Any, posts: list[int]) -> None:
        """A step from a captured graph: returns when its results may be used.

        Args:
            graph: a ``torch.cuda.CUDAGraph`` that was captured in `capturing`.
            posts: what `capturing` gave.

        Raises:
            StepError: see `Mailbox.check`.
        """
        self.experts.mailbox.announce(posts[0])
        try:
            graph.replay()
        except BaseException:
            self.experts.mailbox.settle()  # its posts will not come
            raise
        self._synchronise()
        self.experts.mailbox.check()


def _tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Tokens that a pass sends through every layer, from what the model was called with."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is not None:
        return int(ids.numel())
    embedded = kwargs.get("inputs_embeds")
    if embedded is None:
        raise EngineError("a forward pass without input_ids", hint="pass input_ids by name")
    return int(embedded.shape[0] * embedded.shape[1])


def load_on_card(
    folder: Path | str,
    *,
    share: float = 0.0,
    heat_file: Path | str | None = None,
    card: CardAccess | None = None,
    dtype: Any = None,
    capacity_bytes: int | None = None,
    pool: Pool | None = None,
    variant: Variant | None = None,
    max_tokens: int = MAX_TOKENS,
    stall_seconds: float = STALL_SECONDS,
) -> CardServed:
    """A checkpoint folder as a transformers model on a card, every expert in host memory too.

    Args:
        folder: as downloaded, experts in MXFP4.
        share: of the experts of each layer that the card computes; `CardServed.place` changes it.
        heat_file: which ones (`transformers_adapter.split_of`).
        card: None: GPU 0.
        dtype: of torch, for everything but the experts; None: the config's.
        capacity_bytes: of the card, for experts; None: what ``share`` needs.
        pool: the CPU's workers; None: by the settings, by default all cores but the one that
            launches: workers poll while a step is in flight.
        variant: how the card waits for the CPU; None: MOET_MAILBOX.
        max_tokens: of a step; longer passes are cut.
        stall_seconds: see `Mailbox`.

    Raises:
        MoetError: see ``transformers_model.build``, `open_card`, `CardExperts`, `probe.choose`.
    """
    checkpoint = open_checkpoint(folder)
    geometry = checkpoint.geometry
    split = transformers_adapter.split_of(geometry, share, heat_file)
    spec = transformers_adapter.layer_spec(geometry)
    if capacity_bytes is None:
        capacity_bytes = sum(map(len, split.values())) * spec.layout.record_bytes
    with ExitStack() as stack:
        if card is None:
            card = open_card()
            stack.callback(card.close)
        model = transformers_model.build(checkpoint, dtype, card.device)
        modules = transformers_model.experts_by_layer(model, geometry)
        pool = pool or transformers_adapter.default_pool(spare=1)
        tier = transformers_adapter.read_experts(checkpoint, stack)
        experts = CardExperts(
            card.gpu, card.link, card.memory, pool, dict.fromkeys(geometry.moe_layers, spec),
            capacity_bytes=capacity_bytes,
            max_tokens=max_tokens,
            variant=variant or choose(card.gpu, card.link, pool, env.read().mailbox),
            stall_seconds=stall_seconds,
            isa=env.read().isa,
        )  # fmt: skip
        stack.callback(experts.close)
        layers = _attach(modules, experts, tier, geometry, card.device)
        experts.place(split, hybrid_op.stream_of(card.device))
        owned = stack.pop_all()
    return CardServed(model, checkpoint, layers, owned, experts=experts, card=card)


def _attach(
    modules: dict[int, Any], experts: CardExperts, tier: RamTier, geometry: ModelGeometry,
    device: torch.device,
) -> dict[int, CardLayer]:  # fmt: skip
    """Binds every layer to its experts and its module to the op."""
    number, layers = op.next_model(), {}
    for index, module in modules.items():
        experts.bind(transformers_adapter.leases_of(tier, geometry, index))
        key = transformers_adapter.key_of(number, index)
        layers[index] = CardLayer(key, experts.layers[index], device)
        hybrid_op.attach(key, layers[index])
        transformers_model.bind(module, _compute_on_card(key))
    return layers


def _compute_on_card(key: str) -> transformers_model.Compute:
    return lambda x, weights, ids: torch.ops.moet.hybrid_experts(x, weights, ids, key)
