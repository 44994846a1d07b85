"""Muon for the matrices, Adam for the rest, one learning-rate factor for both.

Muon: momentum, then the nearest semi-orthogonal matrix to the update (Newton-Schulz on a quintic
that lifts every singular value towards 1), so that all directions of a matrix learn at one rate.
Stacked experts are a batch of matrices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """[..., m, n] -> about U V^T of its singular value decomposition, bf16."""
    a, b, c = QUINTIC
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum with decoupled weight decay; equal shapes step as one batch."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(list(params), defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every matrix."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                by_shape[p.shape].append(p)
            for params in by_shape.values():
                self.step_together(params, group["lr"], group["momentum"], group["weight_decay"])

    def step_together(
        self, params: list[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        """Parameters of one shape [..., m, n]."""
        grads = [p.grad for p in params]
        buffers = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in params]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        updates = torch._foreach_lerp(grads, buffers, momentum)
        m, n = params[0].shape[-2:]
        scale = lr * max(1.0, m / n) ** 0.5
        stacked = orthogonalise(torch.stack(list(updates))).float().unbind(0)
        torch._foreach_mul_(params, 1 - lr * weight_decay)
        torch._foreach_add_(params, list(stacked), alpha=-scale)


class Optimizers:
    """Both of them, stepped together."""

    def __init__(self, model: nn.Module, *, muon_lr: float, adam_lr: float, decay: float) -> None:
        matrices, others = [], []
        for name, p in model.named_parameters():
            hidden = p.ndim >= 2 and "embed" not in name and not name.endswith("mlp.gate.weight")
            (matrices if hidden else others).append(p)
        self.others = others
        fused = others[0].is_cuda
        self.parts: list[torch.optim.Optimizer] = [
            Muon(matrices, muon_lr, 0.95, decay),
            torch.optim.Adam(others, adam_lr, betas=(0.9, 0.98), eps=1e-10, fused=fused),
        ]
        self.base = [muon_lr, adam_lr]

    def step(self, factor: float) -> None:
        """Clip, step at `factor` of the base rates, clear the gradients."""
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        for part, base in zip(self.parts, self.base, strict=True):
            part.param_groups[0]["lr"] = base * factor
            part.step()
            part.zero_grad(set_to_none=True)
