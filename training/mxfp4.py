"""MXFP4 for training and export: one rule, so that what trains is what is served.

A block is 32 consecutive elements along K. Its scale byte comes from the bits of the largest
magnitude m (fp32): `b = exponent(m + a quarter of its own binade) - 2`, kept in 1..254. So m goes
up a binade when its mantissa is 1.75 or more, and m / 2^(b-127) lies in [3.5, 7): only values above
6 are clipped, by less than a seventh. The code of m is then 4 or 6, never less, hence quantising
the dequantised weights gives the same bytes again (4 has mantissa 1.0 and 6 has 1.5: same
binade, same b). Rounding is to nearest, ties to the even code.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def scale_bytes(blocks: Tensor) -> Tensor:
    """Blocks [..., 32] fp32 -> biased exponents [..., 1] int32, in 1..254."""
    peak = blocks.abs().amax(-1, keepdim=True).contiguous().view(torch.int32)
    return (((peak + (1 << 21)) >> 23) - 2).clamp(1, 254)


def power(exponents: Tensor) -> Tensor:
    """2^(b-127) exactly, fp32, for b in 1..254."""
    return (exponents << 23).view(torch.float32)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 value, ties to the even code, clipped at 6. Same shape, fp32."""
    magnitude = x.abs()
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    rounded = (torch.round(magnitude / step) * step).clamp(max=6.0)
    return torch.copysign(rounded, x)


def split(w: Tensor) -> Tensor:
    """[..., K] -> [..., K/32, 32] fp32."""
    return w.float().unflatten(-1, (-1, BLOCK))


def fake_quantize(w: Tensor) -> Tensor:
    """The value w will have after export: [..., K] fp32 -> [..., K] fp32."""
    blocks = split(w)
    scale = power(scale_bytes(blocks))
    return (round_e2m1(blocks / scale) * scale).flatten(-2)


def straight_through(w: Tensor) -> Tensor:
    """fake_quantize forwards, identity backwards."""
    fixed = w.detach()
    return w + (fake_quantize(fixed) - fixed)


def encode(w: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] -> codes [..., K/2] uint8 (low nibble = even k), scales [..., K/32] uint8."""
    blocks = split(w)
    exponents = scale_bytes(blocks)
    values = round_e2m1(blocks / power(exponents)).flatten(-2)
    table = torch.tensor(MAGNITUDES, device=w.device)
    index = torch.searchsorted(table, values.abs().contiguous()).to(torch.uint8)
    codes = index | (torch.signbit(values).to(torch.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), exponents.squeeze(-1).to(torch.uint8)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse of encode: fp32 [..., K]. Exact in bf16 too."""
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=codes.device)
    values = split(table[nibbles.long()])
    return (values * power(scales.to(torch.int32)).unsqueeze(-1)).flatten(-2)
