"""Traces of a model that is not there: Zipf by layer, with drift, and prompts in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import UsageError
from moet.hybrid.trace import Call, Trace


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """What a made trace is like.

    Attributes:
        layers: MoE layers.
        experts: of a layer, E.
        top_k: experts a token.
        steps: decode steps.
        streams: tokens of a decode step; each chooses by itself.
        zipf: exponent: the expert of rank r is chosen with weight r^-zipf.
        drift: share of the experts of a layer that trade ranks with another in 1000 steps.
        prompt_every: a prefill comes after so many decode steps; 0: none.
        prompt_tokens: of it.
        seed: the same seed makes the same trace.

    Raises:
        UsageError: sizes that cannot be.
    """

    layers: int = 8
    experts: int = 128
    top_k: int = 8
    steps: int = 1000
    streams: int = 1
    zipf: float = 1.0
    drift: float = 0.5
    prompt_every: int = 200
    prompt_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        whole = {"layers": 1, "experts": 1, "top_k": 1, "steps": 1, "streams": 1, "seed": 0}
        whole |= {"prompt_every": 0, "prompt_tokens": 1}
        odd = [name for name, least in whole.items() if getattr(self, name) < least]
        odd += [name for name in ("zipf", "drift") if not 0 <= getattr(self, name) < 100]
        odd += ["top_k"] if self.top_k > self.experts else []
        if odd:
            said = ", ".join(f"{name} {getattr(self, name)}" for name in dict.fromkeys(odd))
            raise UsageError(f"a trace with {said} cannot be made", hint="take plain sizes")


def make_trace(like: Synthetic) -> Trace:
    """Makes a trace."""
    return Trace(tuple(range(like.layers)), like.experts, like.top_k, list(_calls(like)))


def _calls(like: Synthetic) -> Iterator[Call]:
    rng = np.random.default_rng(like.seed)
    weights = np.arange(1, like.experts + 1, dtype=np.float64) ** -like.zipf
    ranks = np.stack([rng.permutation(like.experts) for _ in range(like.layers)])
    for step in range(like.steps):
        if like.prompt_every and step % like.prompt_every == like.prompt_every - 1:
            for layer in range(like.layers):
                asked = _choose(rng, weights[ranks[layer]], like.prompt_tokens, like.top_k)
                yield Call(layer, like.prompt_tokens, (), asked)
        for layer in range(like.layers):
            asked = _choose(rng, weights[ranks[layer]], like.streams, like.top_k)
            yield Call(layer, like.streams, asked)
        _drift(rng, ranks, like.drift)


def _choose(
    rng: np.random.Generator, weights: NDArray[np.float64], tokens: int, top_k: int
) -> tuple[int, ...]:
    """Experts that some tokens choose, each ``top_k`` different ones: those that come first in a
    race at the rates of their weights (Efraimidis and Spirakis, Information Processing Letters
    97(5), 2006).
    """
    keys = rng.standard_exponential((tokens, len(weights))) / weights
    chosen = np.argpartition(keys, top_k - 1, axis=1)[:, :top_k]
    return tuple(np.unique(chosen).tolist())


def _drift(rng: np.random.Generator, ranks: NDArray[np.int64], drift: float) -> None:
    """Pairs of experts trade ranks, so many that the share is met on average."""
    experts = ranks.shape[1]
    for layer in ranks:
        for _ in range(rng.poisson(drift * experts / 2000)):
            one, other = rng.integers(0, experts, 2)
            layer[[one, other]] = layer[[other, one]]
