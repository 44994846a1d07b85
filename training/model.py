"""qwen3_moe in plain torch, for training: every expert is computed for every token and masked.

With experts this small two big matrix products over all experts cost less than sorting tokens,
and the mask makes the result the same sum: an expert that the router did not pick has weight 0.
Weights are fp32 masters; each use casts to the compute dtype, experts after MXFP4 rounding.

Shapes: N tokens (rows times length), H hidden, E experts, I expert width, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.geometry import Geometry
from training.mxfp4 import straight_through


class Weight(nn.Module):
    """A bare weight, named as checkpoints name it."""

    def __init__(self, *shape: int, std: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*shape) if std is None else torch.randn(*shape) * std)

    def to_like(self, x: Tensor) -> Tensor:
        """The weight in x's dtype."""
        return self.weight.to(x.dtype)


class Norm(Weight):
    """RMS norm over the last dimension; statistics in fp32, the product in x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.to_like(x) * scaled.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with q/k norm; the softmax itself runs outside, in `TinyMoe`."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        std = g.hidden**-0.5
        self.g = g
        self.q_proj = Weight(g.heads * g.head_dim, g.hidden, std=std)
        self.k_proj = Weight(g.kv_heads * g.head_dim, g.hidden, std=std)
        self.v_proj = Weight(g.kv_heads * g.head_dim, g.hidden, std=std)
        self.o_proj = Weight(g.hidden, g.heads * g.head_dim, std=std * (2 * g.layers) ** -0.5)
        self.q_norm = Norm(g.head_dim, g.eps)
        self.k_norm = Norm(g.head_dim, g.eps)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N, H] -> q [N, heads, D], k and v [N, kv_heads, D], rotated."""
        q, k, v = (
            functional.linear(x, p.to_like(x)).unflatten(-1, (-1, self.g.head_dim))
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin), v

    def out(self, x: Tensor) -> Tensor:
        """[N, heads * D] -> [N, H]."""
        return functional.linear(x, self.o_proj.to_like(x))


class Experts(nn.Module):
    """Stacked expert weights [E, out, in]."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()

        def stack(out: int, into: int, std: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(g.experts, out, into) * std)

        self.gate_proj = stack(g.moe_inter, g.hidden, g.hidden**-0.5)
        self.up_proj = stack(g.moe_inter, g.hidden, g.hidden**-0.5)
        self.down_proj = stack(g.hidden, g.moe_inter, (2 * g.layers * g.moe_inter) ** -0.5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x [N, H], mask [N, E] (routing weight or 0) -> [N, H]."""
        gate, up, down = (
            straight_through(w).to(x.dtype) for w in (self.gate_proj, self.up_proj, self.down_proj)
        )
        experts = mask.shape[-1]
        g = functional.linear(x, gate.flatten(0, 1)).unflatten(-1, (experts, -1))
        u = functional.linear(x, up.flatten(0, 1)).unflatten(-1, (experts, -1))
        h = functional.silu(g) * u * mask.to(x.dtype).unsqueeze(-1)
        return h.flatten(1) @ down.transpose(1, 2).flatten(0, 1)


class Moe(nn.Module):
    """Router and experts."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.top_k = g.top_k
        self.gate = Weight(g.experts, g.hidden, std=g.hidden**-0.5)
        self.experts = Experts(g)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, H] -> mask [N, E] fp32 and the routing losses (balance, z, load [E])."""
        logits = functional.linear(x, self.gate.to_like(x)).float()
        probs = logits.softmax(-1)
        top, index = probs.topk(self.top_k, -1)
        top = top / top.sum(-1, keepdim=True)
        mask = torch.zeros_like(probs).scatter(-1, index, top.to(x.dtype).float())
        load = torch.zeros_like(probs).scatter(-1, index, 1.0).mean(0)
        balance = load.numel() / self.top_k * (load * probs.mean(0)).sum()
        z = logits.logsumexp(-1).square().mean()
        return mask, torch.cat((balance[None], z[None], load))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, H] -> [N, H] and the routing losses."""
        mask, losses = self.route(x)
        return self.experts(x, mask), losses


class Block(nn.Module):
    """One layer in two halves, so that the halves compile once for every row length."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.input_layernorm = Norm(g.hidden, g.eps)
        self.self_attn = Attention(g)
        self.post_attention_layernorm = Norm(g.hidden, g.eps)
        self.mlp = Moe(g)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N, H] -> q, k, v."""
        return self.self_attn.heads(self.input_layernorm(x), cos, sin)

    def after(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Residual [N, H] and attention [N, heads * D] -> [N, H] and the routing losses."""
        x = x + self.self_attn.out(mixed)
        added, losses = self.mlp(self.post_attention_layernorm(x))
        return x + added, losses


class Trunk(nn.Module):
    """Embedding, layers, last norm."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.embed_tokens = Weight(g.vocab, g.hidden, std=0.02)
        self.layers = nn.ModuleList(Block(g) for _ in range(g.layers))
        self.norm = Norm(g.hidden, g.eps)


class TinyMoe(nn.Module):
    """The whole model. `named_parameters` are checkpoint names, experts stacked."""

    def __init__(self, g: Geometry, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.g, self.dtype = g, dtype
        self.model = Trunk(g)
        self.fast: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def compile(self) -> None:  # type: ignore[override]
        """Compile the two halves of a block, once for all layers; used where `fast` is asked."""
        self.fast = (torch.compile(Block.before), torch.compile(Block.after))

    def angles(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, D] in the compute dtype."""
        device = self.model.norm.weight.device
        steps = torch.arange(0, self.g.head_dim, 2, device=device).float() / self.g.head_dim
        turns = torch.arange(length, device=device).float()[:, None] / self.g.rope_theta**steps
        both = torch.cat((turns, turns), -1).repeat(rows, 1).unsqueeze(1)
        return both.cos().to(self.dtype), both.sin().to(self.dtype)

    def forward(self, ids: Tensor, *, fast: bool = False) -> tuple[Tensor, Tensor]:
        """ids [rows, length] -> final hidden [N, H] and routing losses [layers, 2 + E]."""
        before, after = self.fast if fast and self.fast else (Block.before, Block.after)
        rows, length = ids.shape
        cos, sin = self.angles(rows, length)
        x = functional.embedding(ids.flatten(), self.model.embed_tokens.weight).to(self.dtype)
        losses = []
        for block in self.model.layers:
            q, k, v = before(block, x, cos, sin)
            x, routing = after(block, x, attend(q, k, v, rows))
            losses.append(routing)
        return self.model.norm(x), torch.stack(losses)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, vocab] through the tied embedding."""
        return functional.linear(hidden, self.model.embed_tokens.to_like(hidden))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position, halves layout. x [N, heads, D]."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def attend(q: Tensor, k: Tensor, v: Tensor, rows: int) -> Tensor:
    """Causal attention inside each row: [N, heads, D] -> [N, heads * D]."""
    q, k, v = (t.unflatten(0, (rows, -1)).transpose(1, 2) for t in (q, k, v))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(0, 1).flatten(1)
