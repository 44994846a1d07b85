"""Which records stay in memory: pure functions of a ledger. Same ledger, same decision.

Three known schemes, made of the same parts, for records of one size whose uses are counted exactly
(a model has at most some 10^5 experts, so nothing needs a sketch):

- *SLRU*, segmented LRU (Karedla, Love, Wherry: "Caching Strategies to Improve Disk System
  Performance", IEEE Computer 27(3), 1994): what was used once is on probation, what was used again
  is protected; victims come from probation.
- *TinyLFU* (Einziger, Friedman, Manes: "TinyLFU: A Highly Efficient Cache Admission Policy", ACM
  Transactions on Storage 13(4), 2017): a newcomer that was used less than the victim is not let in.
  As there, a small window in LRU order takes all that is not let in.
- *LFU with exponential decay* (the lambda = 1/half-life of LRFU: Lee and others, IEEE Transactions
  on Computers 50(12), 2001): a use counts half as much after every half-life.

Scan resistance: a prefill sweeps over nearly all experts once. Its uses count nothing, and it never
displaces what decode has used. Time is counted in decode calls of a layer, so that nothing but the
routing enters a decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import UsageError

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
NOBODY: Final = -1

_REBASE: Final = 512.0  # half-lives after which scores are scaled down: far inside of float64


class Order(StrEnum):
    """What makes a record worth keeping."""

    RECENCY = "recency"
    FREQUENCY = "frequency"


class Part(IntEnum):
    """Where a record is kept. Of two parts the lower one gives up its records first."""

    ABSENT = 0
    WINDOW = 1
    PROBATION = 2
    PROTECTED = 3


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A scheme.

    Attributes:
        order: by what victims are chosen.
        half_life: decode calls of a layer after which a use counts half.
        prior: weight of recorded heat, 0 to 1: as much as a steady state of it would have left.
        protected: share of the main part that may be protected; 0: no segments.
        admission: a newcomer must be worth more than the victim.
        hysteresis: by which share more.
        resists_sweeps: prefill displaces nothing that decode has used, and counts nothing.
    """

    order: Order
    half_life: float = 128.0
    prior: float = 0.0
    protected: float = 0.0
    admission: bool = False
    hysteresis: float = 0.0
    resists_sweeps: bool = True

    def __post_init__(self) -> None:
        shares = {"prior": self.prior, "protected": self.protected}
        odd = [f"{name} {value}" for name, value in shares.items() if not 0 <= value <= 1]
        if not 0 < self.half_life < np.inf:
            odd.append(f"half_life {self.half_life}")
        if not 0 <= self.hysteresis < np.inf:
            odd.append(f"hysteresis {self.hysteresis}")
        if odd:
            hint = "shares are 0 to 1, the half-life is positive, the hysteresis 0 or more"
            raise UsageError(f"a policy with {' and '.join(odd)}", hint=hint)


POLICIES: Final[dict[str, Policy]] = {
    "lru": Policy(order=Order.RECENCY, resists_sweeps=False),
    "slru": Policy(order=Order.RECENCY, protected=0.8),
    "lfu": Policy(order=Order.FREQUENCY, admission=True, hysteresis=0.1),
    "heat": Policy(order=Order.FREQUENCY, admission=True, hysteresis=0.1, prior=1.0),
}


def named(name: str) -> Policy:
    """The policy of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in POLICIES:
        raise UsageError(f"there is no policy {name!r:.40}", hint=f"one of {', '.join(POLICIES)}")
    return POLICIES[name]


class Ledger:
    """What is known of every record, by its id: arrays [N].

    Args:
        layers: index of each record's layer, from 0 up, [N].

    Attributes:
        part: where it is kept (``Part``).
        last: number of the call that used it last; 0: none.
        score: its uses, decayed, in units of a use at the origin of time.
        proven: decode has used it since it came.
        calls: decode calls of each layer, [layers].
    """

    def __init__(self, layers: Ids) -> None:
        count = len(layers)
        self.layers = np.asarray(layers, np.int64)
        self.part: NDArray[np.uint8] = np.zeros(count, np.uint8)
        self.last: Ids = np.zeros(count, np.int64)
        self.score: NDArray[np.float64] = np.zeros(count, np.float64)
        self.proven: Mask = np.zeros(count, np.bool_)
        self.calls: Ids = np.zeros(int(self.layers.max(initial=-1)) + 1, np.int64)
        self.number = 0
        self._origin = 0.0

    def expect_heat(self, policy: Policy, rates: NDArray[np.float64]) -> None:
        """Begins with recorded heat: the score that uses at such rates tend to.

        Args:
            policy: its prior and its half-life.
            rates: share of the decode calls that used each record, 0 to 1, [N].
        """
        steady = 1.0 / (1.0 - 2.0 ** (-1.0 / policy.half_life))
        self.score += policy.prior * steady * np.clip(rates, 0.0, 1.0)

    def use(self, policy: Policy, ids: Ids, sweep: Mask) -> None:
        """Notes a call, usually of one layer.

        Args:
            policy: says what counts.
            ids: of the records that it uses, each once.
            sweep: which of them only prefill asked for.
        """
        self.number += 1
        decoded = ids if not sweep.any() else ids[~sweep]
        counted = decoded if policy.resists_sweeps else ids
        self.last[counted] = self.number
        if counted.size < ids.size:  # the window is in LRU order for everybody
            self.last[ids[self.part[ids] <= Part.WINDOW]] = self.number
        if counted.size:
            self._count(policy, counted)
        if policy.protected:
            again = decoded[(self.part[decoded] == Part.PROBATION) & self.proven[decoded]]
            self.part[again] = Part.PROTECTED
        self.proven[decoded] = True

    def _count(self, policy: Policy, ids: Ids) -> None:
        layers = self.layers[ids]
        of_one = bool((layers == layers[0]).all())
        self.calls[layers[:1] if of_one else np.unique(layers)] += 1
        ages = self.calls[layers] / policy.half_life - self._origin
        while ages.max() > _REBASE:
            self.score *= 2.0**-_REBASE
            self._origin += _REBASE
            ages -= _REBASE
        self.score[ids] += 2.0**ages

    def worth(self, policy: Policy) -> NDArray[np.float64] | Ids:
        """What victims are chosen by, the lowest first, [N]."""
        return self.last if policy.order is Order.RECENCY else self.score

    def main(self) -> int:
        """Records outside of the window."""
        return int(np.count_nonzero(self.part >= Part.PROBATION))


def lowest(values: NDArray[np.float64] | Ids, among: Ids) -> int:
    """The id of the lowest value; of equals the highest id; NOBODY of none."""
    if not among.size:
        return NOBODY
    chosen = values[among]
    return int(among[np.flatnonzero(chosen == chosen.min())[-1]])


def victim(ledger: Ledger, policy: Policy, free: Mask, *, sweep: bool) -> int:
    """Who would give up its place in the main part; NOBODY if none can.

    Args:
        ledger: what is known.
        policy: the scheme.
        free: records that nobody has leased or waits for, [N]: no others are victims.
        sweep: for a prefill's newcomer.
    """
    open_to = free & (ledger.part >= Part.PROBATION)
    if sweep and policy.resists_sweeps:
        open_to &= ~ledger.proven
    ids = np.flatnonzero(open_to)
    if ids.size:
        parts = ledger.part[ids]
        ids = ids[parts == parts.min()]
    return lowest(ledger.worth(policy), ids)


def admits(ledger: Ledger, policy: Policy, newcomer: int, loser: int) -> bool:
    """Whether a newcomer takes a victim's place in the main part."""
    if loser == NOBODY:
        return False
    if not policy.admission:
        return True
    worth = ledger.worth(policy)
    return bool(worth[newcomer] > worth[loser] * (1.0 + policy.hysteresis))


def oldest(ledger: Ledger, free: Mask) -> int:
    """Who leaves the window next: the least recently used; NOBODY if none can."""
    return lowest(ledger.last, np.flatnonzero(free & (ledger.part == Part.WINDOW)))


def over_protected(ledger: Ledger, policy: Policy, main: int) -> list[int]:
    """Who goes back to probation: the least worth of those that are more than the protected share
    of a main part of ``main`` records."""
    protected = np.flatnonzero(ledger.part == Part.PROTECTED)
    surplus = len(protected) - int(policy.protected * main)
    if surplus <= 0:
        return []
    order = np.lexsort((-protected, ledger.worth(policy)[protected]))
    return [int(i) for i in protected[order[:surplus]]]


def rates(counts: NDArray[np.int64], top_k: int) -> NDArray[np.float64]:
    """Recorded heat as shares of tokens.

    Args:
        counts: tokens that each expert of each layer was given, [layers, experts].
        top_k: experts a token.

    Returns:
        Share of the tokens, 0 to 1, [layers, experts]; 0 in layers that counted none.
    """
    tokens = counts.sum(axis=1, keepdims=True) / top_k
    shares: NDArray[np.float64] = np.minimum(1.0, counts / np.maximum(tokens, 1.0))
    return shares
