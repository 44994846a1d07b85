"""What a policy is worth: a routing trace drives the placement of the cascade, without an engine.

The decisions are those of ``tiers.cascade`` where every read is over before the next call. A stall
is what a disk of the given bandwidth would have needed for the bytes of the misses: nothing is
hidden behind computing, so it is what a lookahead could save at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import UsageError
from moet.bench.record import Record, Row, make_record
from moet.hybrid.trace import Call, Trace, count_heat, steps
from moet.tiers.placement import Placement, window_slots
from moet.tiers.policy import POLICIES, Policy, named, rates

BEST = "optimum"
"""Not a policy: what nobody can beat who does not know the future."""

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to replay.

    Attributes:
        trace: the calls.
        source: where they are from, for the record.
        policies: names of `POLICIES`, and ``BEST``.
        budgets: shares of all experts that memory holds, each above 0 and at most 1.
        record_bytes: of an expert.
        bandwidth: of the disk, bytes a second.
        skip: share of the steps that warm up: not counted, but what recorded heat is taken from.
        window: slots of the window; None: as the cascade chooses.

    Raises:
        UsageError: values that cannot be.
    """

    trace: Trace
    source: dict[str, Any]
    policies: tuple[str, ...] = (*POLICIES, BEST)
    budgets: tuple[float, ...] = (0.5, 0.25, 0.1)
    record_bytes: int = 13 << 20
    bandwidth: float = 5e9
    skip: float = 0.25
    window: int | None = None

    def __post_init__(self) -> None:
        for name in self.policies:
            if name != BEST:
                named(name)
        odd = [f"a budget of {100 * b:.3g} %" for b in self.budgets if not 0 < b <= 1]
        odd += [f"a window of {self.window} slots"] if self.window and self.window < 0 else []
        odd += [f"records of {self.record_bytes} bytes"] if self.record_bytes < 1 else []
        odd += [f"{self.bandwidth:.3g} bytes a second"] if not 0 < self.bandwidth < np.inf else []
        odd += [f"a warm-up of {100 * self.skip:.3g} %"] if not 0 <= self.skip < 1 else []
        if odd:
            raise UsageError(f"{odd[0]} cannot be replayed", hint="moet replay --help")


@dataclass(frozen=True)
class Numbered:
    """A call as numbers of records."""

    ids: NDArray[np.int64]
    sweep: NDArray[np.bool_]


def numbered(trace: Trace, call: Call) -> Numbered:
    """The records of a call: those of decode first."""
    first = trace.layers.index(call.layer) * trace.experts
    ids = np.array([*call.decode, *call.prefill], np.int64) + first
    return Numbered(ids, np.arange(len(ids)) >= len(call.decode))


def run_call(placement: Placement, call: Numbered) -> int:
    """One call, its reads over at once, group by group as `Cascade.next_group` does it.

    Returns:
        Records that had to be read.
    """
    ids = call.ids
    there = placement.there[ids]
    placement.pins[ids] += 1
    placement.use(ids, call.sweep)
    todo = [(int(i), bool(s)) for i, s in zip(ids[~there], call.sweep[~there], strict=True)]
    group = ids[there].tolist()
    missed = len(todo)
    while todo or group:
        while todo and placement.room(todo[0][0], sweep=todo[0][1]):
            record = todo.pop(0)[0]
            placement.arrived(record)
            group.append(record)
        placement.pins[group] -= 1
        group = []
    return missed


def replay(placement: Placement, calls: Iterable[Numbered]) -> list[int]:
    """Records that every call had to read."""
    return [run_call(placement, call) for call in calls]


def optimum(records: int, slots: int, calls: Sequence[Numbered]) -> list[int]:
    """The fewest reads that any policy could need with so many slots: what is used again last does
    not stay (Belady: "A study of replacement algorithms for a virtual-storage computer", IBM
    Systems Journal 5(2), 1966; with the right not to keep what was read).

    Returns:
        Records that every call had to read.
    """
    next_use = _next_uses(records, calls)
    when = np.full(records, _NEVER)
    there = np.zeros(records, np.bool_)
    missed = []
    for call, uses in zip(calls, next_use, strict=True):
        missed.append(int((~there[call.ids]).sum()))
        there[call.ids] = True
        when[call.ids] = uses
        held = np.flatnonzero(there)
        if len(held) > slots:
            last = np.argpartition(when[held], slots)[slots:]
            there[held[last]] = False
    return missed


def _next_uses(records: int, calls: Sequence[Numbered]) -> list[NDArray[np.int64]]:
    """When each record of each call is used next."""
    seen = np.full(records, _NEVER)
    uses = []
    for number in range(len(calls) - 1, -1, -1):
        ids = calls[number].ids
        uses.append(seen[ids].copy())
        seen[ids] = number
    return uses[::-1]


def run(
    options: Options, progress: Callable[[str, float], None] = lambda what, share: None
) -> Record:
    """Replays every policy with every budget.

    Args:
        options: what.
        progress: told what is being replayed and the share that is done.
    """
    by_step = list(steps(options.trace.calls))
    skipped = int(options.skip * len(by_step))
    flat = [call for step in by_step for call in step]
    calls = [numbered(options.trace, call) for call in flat]
    learnt = [call for step in by_step[:skipped] for call in step]
    results: list[Row] = []
    todo = [(budget, name) for budget in options.budgets for name in options.policies]
    for done, (budget, name) in enumerate(todo):
        progress(f"{name} with {100 * budget:.3g} % in memory", done / len(todo))
        slots = _slots(options.trace, budget)
        missed = _missed(options, name, slots, calls, learnt)
        results.append({"kind": "policy", "policy": name, "budget": budget, "slots": slots})
        results[-1] |= _figures(options, by_step[skipped:], missed[len(learnt) :])
    progress("replayed", 1.0)
    return make_record("replay", _setup(options, len(by_step), skipped), results)


def _slots(trace: Trace, budget: float) -> int:
    return max(1, round(budget * len(trace.layers) * trace.experts))


def _missed(
    options: Options, name: str, slots: int, calls: list[Numbered], learnt: list[Call]
) -> list[int]:
    trace = options.trace
    records = len(trace.layers) * trace.experts
    if name == BEST:
        return optimum(records, slots, calls)
    policy = POLICIES[name]
    window = window_slots(slots, options.record_bytes) if options.window is None else options.window
    layers = np.repeat(np.arange(len(trace.layers)), trace.experts)
    placement = Placement(layers, policy, slots, min(window, slots))
    if policy.prior and learnt:
        placement.ledger.expect_heat(policy, learnt_rates(trace, learnt).ravel())
    return replay(placement, calls)


def learnt_rates(trace: Trace, learnt: list[Call]) -> NDArray[np.float64]:
    """Share of the decode calls that asked for each expert, [layers, experts]."""
    asked = sum(len(call.decode) for call in learnt)
    decoding = sum(bool(call.decode) for call in learnt)
    return rates(count_heat(trace, learnt), max(1, round(asked / max(1, decoding))))


def _figures(options: Options, counted: list[list[Call]], missed: list[int]) -> Row:
    """A row's numbers: of decode steps, and of prefills apart."""
    at = 0
    stalls: list[float] = []
    swept_stalls: list[float] = []
    asked = read = swept_asked = swept_read = 0
    for step in counted:
        misses = sum(missed[at : at + len(step)])
        at += len(step)
        wanted = sum(len(call.decode) + len(call.prefill) for call in step)
        stall = misses * options.record_bytes / options.bandwidth
        if any(call.decode for call in step):
            asked, read = asked + wanted, read + misses
            stalls.append(stall)
        else:
            swept_asked, swept_read = swept_asked + wanted, swept_read + misses
            swept_stalls.append(stall)
    return {
        "steps": len(stalls),
        "hit_rate": 1 - read / asked if asked else float("nan"),
        "bytes_a_step": read * options.record_bytes / len(stalls) if stalls else float("nan"),
        "stall_s": float(np.mean(stalls)) if stalls else float("nan"),
        "stall_p95_s": float(np.quantile(stalls, 0.95)) if stalls else float("nan"),
        "prefills": len(swept_stalls),
        "prefill_hit_rate": 1 - swept_read / swept_asked if swept_asked else float("nan"),
        "prefill_stall_s": float(np.mean(swept_stalls)) if swept_stalls else float("nan"),
    }


def _setup(options: Options, all_steps: int, skipped: int) -> dict[str, Any]:
    trace = options.trace
    return {
        "source": options.source,
        "layers": len(trace.layers),
        "experts": trace.experts,
        "top_k": trace.top_k,
        "calls": len(trace.calls),
        "steps": all_steps,
        "skipped": skipped,
        "record_bytes": options.record_bytes,
        "bandwidth": options.bandwidth,
        "window": options.window,
        "policies": {name: _told(POLICIES[name]) for name in options.policies if name != BEST},
    }


def _told(policy: Policy) -> dict[str, Any]:
    return {**vars(policy), "order": str(policy.order)}
