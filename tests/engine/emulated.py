"""A card that the CPU stands in for, as torch sees it: its memory is the CPU's own."""

from __future__ import annotations

import ctypes

import torch
from tests.kernels.cuda_host.emulator import HostGpu, HostLink

from moet.engine.transformers_card import CardAccess
from moet.testing.card import HostCard

PATIENT = 20.0
"""Seconds; the stand-in's blocks run one by one."""


class PromptCard(HostCard):
    """A stand-in whose streams have always ended: their fences pass at once."""

    def record(self, stream: int) -> int:
        event = super().record(stream)
        self.finish(event)
        return event


def emulated_card(library: ctypes.CDLL) -> CardAccess:
    """The parts of a card; its tensors are torch's on the CPU."""
    gpu, memory = HostGpu(library), PromptCard()
    return CardAccess(
        gpu=gpu,
        link=HostLink(gpu),
        memory=memory,
        device=torch.device("cpu"),
        close=memory.close,
    )
