"""How unevenly the router uses the experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def skew(load: Tensor) -> dict[str, Any]:
    """load [layers, E] (slots a token) -> shares of all routings, in percent, a layer."""
    shares = 100 * load.double().cpu() / load.double().cpu().sum(-1, keepdim=True)
    ordered = shares.sort(-1, descending=True).values
    fifth = max(1, round(0.2 * shares.shape[-1]))
    entropy = -(shares / 100 * (shares / 100).clamp(min=1e-12).log2()).sum(-1)
    return {
        "shares": [[round(v, 3) for v in row] for row in shares.tolist()],
        "busiest_fifth": [round(v, 2) for v in ordered[:, :fifth].sum(-1).tolist()],
        "busiest": [round(v, 2) for v in ordered[:, 0].tolist()],
        "idlest": [round(v, 3) for v in ordered[:, -1].tolist()],
        "effective_experts": [round(v, 2) for v in torch.exp2(entropy).tolist()],
    }
