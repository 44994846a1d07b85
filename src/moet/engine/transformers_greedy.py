"""Greedy answers and their log-probabilities, token by token, eager or from a captured decode step.

One sequence at a time over a cache of fixed size: every step then has the same shapes however the
experts are split, so answers may be compared with ==. The end-of-text token does not end an answer:
all answers have the length that was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers

from moet.base.errors import UnsupportedError, UsageError
from moet.engine.transformers_adapter import Served
from moet.engine.transformers_card import CardServed

_WARM_UP: Final = 3


@dataclass(frozen=True)
class Answer:
    """What a model says.

    Attributes:
        tokens: the likeliest ones.
        logprobs: of them, computed in fp32; NaN nowhere.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class Greedy:
    """Answers prompts with one model.

    Args:
        served: the model.
        length: most tokens of a prompt and its answer.
        captured: decode steps are replayed from a CUDA graph; only with a model on a card.

    Raises:
        UnsupportedError: attention over windows, which needs other masks than these; or a graph
            without a card.
    """

    def __init__(self, served: Served, length: int, *, captured: bool = False) -> None:
        self.served, self.length = served, length
        self._device = served.device
        config = served.model.config.get_text_config()
        self._cache = transformers.StaticCache(config=config, max_cache_len=length)
        if any(layer.is_sliding for layer in self._cache.layers):
            hint = "use the model's own generate"
            raise UnsupportedError("greedy answers of a model with attention windows", hint=hint)
        self._places = torch.arange(length, device=self._device)
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        self._position = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        self._logprob = torch.zeros(1, dtype=torch.float32, device=self._device)
        with torch.no_grad():
            self._graph: tuple[Any, list[int]] | None = self._capture() if captured else None

    def answer(self, prompt: Sequence[int], tokens: int) -> Answer:
        """The likeliest continuation of a tokenised prompt.

        Raises:
            UsageError: no prompt, or more tokens than the cache holds.
            StepError: an answer of the CPU did not come.
        """
        if not prompt or tokens < 1 or len(prompt) + tokens > self.length:
            what = f"{len(prompt)} tokens to answer with {tokens} in a cache of {self.length}"
            raise UsageError(what, hint="make Greedy with a greater length")
        with torch.no_grad():
            self._begin(prompt)
            said = [self._said()]
            for _ in range(tokens - 1):
                self._decode()
                said.append(self._said())
        return Answer(tuple(token for token, _ in said), tuple(value for _, value in said))

    def _begin(self, prompt: Sequence[int]) -> None:
        self._cache.reset()
        ids = torch.tensor([list(prompt)], device=self._device)
        self._forward(ids, self._places[None, : len(prompt)])
        self._position.fill_(len(prompt))

    def _said(self) -> tuple[int, float]:
        return int(self._token.item()), float(self._logprob.item())

    def _forward(self, ids: Any, positions: Any) -> None:
        """A pass; leaves the likeliest next token and its log-probability in their places."""
        mask = self._places[None, None, None, :] <= positions[:, None, :, None]
        output = self.served.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        best = output.logits[0, -1:].float().log_softmax(-1).max(-1)
        self._token.copy_(best.indices[None])
        self._logprob.copy_(best.values)

    def _step(self) -> None:
        """One token further: all that a captured decode step does."""
        self._forward(self._token, self._position)
        self._position.add_(1)

    def _decode(self) -> None:
        if self._graph is None:
            self._step()
        else:
            self._card.replay(*self._graph)

    @property
    def _card(self) -> CardServed:
        if not isinstance(self.served, CardServed):
            raise UnsupportedError("a CUDA graph of a model on the CPU", hint="load it on a card")
        return self.served

    def _capture(self) -> tuple[Any, list[int]]:
        """The decode step as a graph. What it does to the cache is undone by the next reset."""
        card, graph = self._card, torch.cuda.CUDAGraph()
        aside = torch.cuda.Stream(self._device)
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                self._cache.reset()
                self._position.zero_()
                self._step()
        torch.cuda.current_stream(self._device).wait_stream(aside)
        with card.capturing() as posts, torch.cuda.graph(graph):
            self._step()
        return graph, posts


def answers(
    served: Served, prompts: Sequence[Sequence[int]], tokens: int, *, captured: bool = False
) -> list[Answer]:
    """Greedy answers of ``tokens`` tokens to tokenised prompts, one after the other."""
    greedy = Greedy(served, max(map(len, prompts)) + tokens, captured=captured)
    return [greedy.answer(prompt, tokens) for prompt in prompts]
