"""A routing trace through real memory and a real disk: what each policy reads and waits for there.

Nothing is computed, so all of the reading is stall: the worst case for a disk, and the place to see
whether a prediction (``bench.replay``) holds on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moet.base.errors import UsageError
from moet.bench.record import Record, Row, make_record
from moet.bench.replay import learnt_rates
from moet.hybrid.trace import Call, Trace, steps
from moet.tiers.api import ExpertKey
from moet.tiers.below import Below
from moet.tiers.cascade import Cascade
from moet.tiers.policy import POLICIES, named

Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to drive.

    Attributes:
        trace: the calls; its layers and experts are those of ``below``, from the first on.
        source: where they are from, for the record.
        policies: names of `POLICIES`.
        budgets: shares of all experts of the trace that memory holds, above 0 and at most 1.
        skip: share of the steps that warm up and are not counted.
        window: slots of the window; None: as the cascade chooses.
    """

    trace: Trace
    source: dict[str, Any]
    policies: tuple[str, ...]
    budgets: tuple[float, ...]
    skip: float = 0.25
    window: int | None = None


def keys_of(below: Below, trace: Trace) -> dict[int, list[ExpertKey]]:
    """Which experts below stand for those of each layer of a trace.

    Raises:
        UsageError: the trace has more layers, or more experts a layer.
    """
    have: dict[int, list[ExpertKey]] = {}
    for key in sorted(below.keys()):
        have.setdefault(key.layer, []).append(key)
    experts = min(map(len, have.values()), default=0)
    if len(have) < len(trace.layers) or experts < trace.experts:
        raise UsageError(
            f"a trace of {len(trace.layers)} layers with {trace.experts} experts does not fit a "
            f"model of {len(have)} with {experts}",
            hint="replay a trace of this model, or make one: --layers, --experts",
        )
    return dict(zip(trace.layers, have.values(), strict=False))


def run(options: Options, below: Below, progress: Progress = lambda what, share: None) -> Record:
    """Drives every policy with every budget, each from empty memory.

    Raises:
        UsageError: a policy that there is not, or a trace of a larger model.
        TierError: a budget that does not fit into this machine.
    """
    for name in options.policies:
        named(name)
    keys = keys_of(below, options.trace)
    sizes = [below.nbytes(key) for of in keys.values() for key in of[: options.trace.experts]]
    by_step = list(steps(options.trace.calls))
    skip = int(options.skip * len(by_step))
    results: list[Row] = []
    todo = [(budget, name) for budget in options.budgets for name in options.policies]
    for done, (budget, name) in enumerate(todo):
        progress(f"{name} with {100 * budget:.3g} % in memory", done / len(todo))
        slots = max(1, round(budget * len(sizes)))
        memory, policy = slots * max(sizes), POLICIES[name]
        learnt = [call for step in by_step[:skip] for call in step] if policy.prior else []
        with Cascade(
            below,
            -(-memory // 4096) * 4096,
            policy=policy,
            window=options.window,
            rates=_heat(keys, options.trace, learnt),
        ) as made:
            row = _drive(made, keys, by_step, skip)
        results.append({"kind": "policy", "policy": name, "budget": budget, "slots": slots} | row)
    progress("replayed", 1.0)
    setup = {
        "source": options.source,
        "layers": len(options.trace.layers),
        "experts": options.trace.experts,
        "top_k": options.trace.top_k,
        "steps": len(by_step),
        "skipped": skip,
        "record_bytes": max(sizes),
        "window": options.window,
    }
    return make_record("replay-disk", setup, results)


def _heat(
    keys: dict[int, list[ExpertKey]], trace: Trace, learnt: list[Call]
) -> dict[ExpertKey, float]:
    """Recorded heat of the calls that only warm up; nothing where none are."""
    if not learnt:
        return {}
    shares = learnt_rates(trace, learnt)
    return {
        key: float(share)
        for of, row in zip(keys.values(), shares, strict=True)
        for key, share in zip(of, row, strict=False)
    }


def _drive(
    cascade: Cascade, keys: dict[int, list[ExpertKey]], by_step: list[list[Call]], skip: int
) -> Row:
    for step in by_step[:skip]:
        _step(cascade, keys, step)
    before, began = cascade.stats(), time.monotonic()
    taken = [(_step(cascade, keys, step), bool(step[0].decode)) for step in by_step[skip:]]
    seconds, after = time.monotonic() - began, cascade.stats()
    stalls = [stall for stall, decodes in taken if decodes]
    asked = after.hits + after.joined + after.misses - before.hits - before.joined - before.misses
    read = after.read_bytes - before.read_bytes
    return {
        "steps": len(stalls),
        "prefills": len(taken) - len(stalls),
        "all_hit_rate": (after.hits - before.hits) / asked if asked else float("nan"),
        "stall_s": float(np.mean(stalls)) if stalls else float("nan"),
        "stall_p95_s": float(np.quantile(stalls, 0.95)) if stalls else float("nan"),
        "read_bytes": read,
        "seconds": seconds,
        "read_rate": read / seconds,
        "failures": after.failures - before.failures,
    }


def _step(cascade: Cascade, keys: dict[int, list[ExpertKey]], step: list[Call]) -> float:
    """Goes through a step; seconds for which there was nothing to compute."""
    stalled = 0.0
    for call in step:
        of = keys[call.layer]
        prefill = {of[e] for e in call.prefill}
        with cascade.want([of[e] for e in (*call.decode, *call.prefill)], prefill) as wanted:
            for _ in wanted:
                pass
        stalled += wanted.stalled_s
    return stalled
