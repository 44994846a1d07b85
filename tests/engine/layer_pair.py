"""One layer twice: its experts on a card and its CPUs, and on the CPU alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tests.engine.emulated import PATIENT

from moet.engine import hybrid_op, op
from moet.engine.hybrid_op import CardLayer
from moet.engine.live import LiveLayer
from moet.engine.transformers_card import CardAccess
from moet.hybrid.card import CardExperts
from moet.hybrid.experts import plan
from moet.kernels.cpu import Pool
from moet.kernels.spec import ActFormat, LayerSpec
from moet.tiers.api import ExpertKey
from moet.tiers.ram import RamTier
from moet.verify.cases import LayerCase

SPEC = LayerSpec(hidden=96, intermediate=64, experts=7, top_k=3, act=ActFormat.MXINT16)
STEP = 4  # most tokens of one


class LayerPair:
    """The ops know it as ``card``, with three of seven experts on the card, and as ``cpu``."""

    def __init__(self, card: CardAccess) -> None:
        case = LayerCase.random(np.random.default_rng(3), SPEC)
        self.tier = RamTier(case.records.size, populate=False)
        for expert, record in enumerate(case.records):
            self.tier.put(ExpertKey(0, expert), record)
        self.card = card
        self.experts = CardExperts(
            self.card.gpu,
            self.card.link,
            self.card.memory,
            Pool(2),
            {0: SPEC},
            capacity_bytes=3 * SPEC.layout.record_bytes,
            max_tokens=STEP,
            stall_seconds=PATIENT,
        )
        self.experts.bind(self.leases())
        self.place(1, 4, 6)
        self.on_card = CardLayer("the layer", self.experts.layers[0], card.device)
        hybrid_op.attach("card", self.on_card)
        alone = plan(SPEC, 64, Pool(1))
        alone.bind(self.leases())
        self.on_cpu = LiveLayer("the layer", alone)
        op.attach("cpu", self.on_cpu)

    def place(self, *experts: int) -> None:
        self.experts.place({0: experts}, hybrid_op.stream_of(self.card.device))

    def leases(self) -> list[Any]:
        return [self.tier.acquire(ExpertKey(0, expert)) for expert in range(SPEC.experts)]

    def close(self) -> None:
        self.experts.close()
        self.on_cpu.experts.close()  # type: ignore[attr-defined]
        self.tier.close()
        self.card.close()


def call(tokens: int, dtype: Any = torch.bfloat16) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, SPEC.hidden, generator=generator).to(dtype)
    weights = torch.rand(tokens, SPEC.top_k, generator=generator)
    drawn = torch.rand(tokens, SPEC.experts, generator=generator)
    return x, weights, drawn.argsort(1)[:, : SPEC.top_k].int()
