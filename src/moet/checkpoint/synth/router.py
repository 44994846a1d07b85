"""Router weights whose top-k choices follow Zipf's law.

Hidden states point anywhere, so a logit is w.x with mean 0: what a router can give an expert is a
*longer* row, that is a logit with a larger spread, which wins more often. Row lengths are found so
that expert number r is among the top k for a share p_r of the tokens, p_r = min(CAP, c * r^-s),
with c such that the shares add up to k. A logit is negative for half of all tokens, so no length
gives a share near 1/2: hence the cap, which the head of a steep law (large s, many slots) reaches.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

CAP = 0.4
_SAMPLES = 1 << 13
_ROUNDS = 8


def zipf_shares(experts: int, top_k: int, exponent: float) -> NDArray[np.float64]:
    """Share of tokens that choose each rank, [E]; adds up to top_k, none above the cap.

    Where even CAP for every expert is too little (top_k > CAP * E), all shares are equal.
    """
    law = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
    if exponent == 0 or top_k >= CAP * experts:
        return np.full(experts, top_k / experts)
    low, high = 0.0, experts / law[-1]
    for _ in range(200):  # bisection on c: the sum grows with it
        c = (low + high) / 2
        low, high = (c, high) if np.minimum(CAP, c * law).sum() < top_k else (low, c)
    shares: NDArray[np.float64] = np.minimum(CAP, high * law)
    return shares


def _chosen(logits: NDArray[np.float32], top_k: int) -> NDArray[np.float64]:
    """Share of the rows [T, E] in which each column is among the top k."""
    chosen = np.argpartition(logits, -top_k, axis=1)[:, -top_k:]
    counts = np.bincount(chosen.ravel(), minlength=logits.shape[1])
    shares: NDArray[np.float64] = counts / len(logits)
    return shares


@lru_cache(maxsize=16)
def row_lengths(experts: int, top_k: int, exponent: float) -> NDArray[np.float64]:
    """Spread of each rank's logit, [E], such that the choices follow ``zipf_shares``.

    First as if the k-th largest logit were the constant 1: then a share p needs the length
    1 / Q^-1(p), Q the upper tail of the normal law. What the constant neglects is put right by
    simulation: a rank that is chosen too rarely gets longer.
    """
    if exponent == 0 or top_k >= CAP * experts:
        return np.ones(experts)
    target = zipf_shares(experts, top_k, exponent)
    rng = np.random.Generator(np.random.SFC64(20))
    normal = rng.standard_normal((_SAMPLES, experts), dtype=np.float32)
    lengths = np.array([-1 / NormalDist().inv_cdf(p) for p in target])
    for _ in range(_ROUNDS):
        got = _chosen(normal * lengths.astype(np.float32), top_k)
        lengths = lengths * ((target + 1e-4) / (got + 1e-4)) ** 0.2
    shortened: NDArray[np.float64] = lengths / lengths.max()
    return shortened


def router_weights(
    hidden: int, experts: int, top_k: int, exponent: float, rng: np.random.Generator
) -> NDArray[np.float32]:
    """fp32 [E, H]: directions at random, ranks given to experts at random.

    Scaled so that for hidden states of mean square 1 the largest logits are a few units.
    """
    lengths = rng.permutation(row_lengths(experts, top_k, exponent))
    rows = rng.standard_normal((experts, hidden), dtype=np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    scaled: NDArray[np.float32] = rows * (2 * lengths[:, None]).astype(np.float32)
    return scaled
