"""What a training run is: limits, rates, curriculum, all by the clock (progress 0..1)."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from random import Random

LENGTHS = {512: 65_536, 1024: 16_384, 4096: 12_288}  # rows kept in the pool
CURRICULUM = (
    (0.12, {512: 0.7, 1024: 0.3, 4096: 0.0}),
    (0.40, {512: 0.4, 1024: 0.2, 4096: 0.4}),
    (1.00, {512: 0.4, 1024: 0.2, 4096: 0.4}),
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Flags of `python -m training.train`, with their defaults."""

    out: str = "out"
    tokenizer: str = "src/moet/demo/moet-tiny"
    start_from: str = ""
    seconds: float = 360.0
    final_samples: int = 2000
    step_tokens: int = 131_072
    workers: int = 14
    seed: int = 1
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    weight_decay: float = 0.02
    warmup: float = 0.01
    decay_from: float = 0.45
    balance: float = 0.01
    tilt: float = 1.8
    z: float = 0.001
    compile: int = 1
    probe_every: float = 45.0
    probe_samples: int = 200


def parse(argv: list[str] | None = None) -> Plan:
    """Flags to a plan; unknown flags are refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    for f in fields(Plan):
        flag = "--" + f.name.replace("_", "-")
        parser.add_argument(flag, type=type(f.default), default=f.default)
    return Plan(**vars(parser.parse_args(argv)))


def rate(plan: Plan, progress: float) -> float:
    """Warm up, hold, fall linearly to zero."""
    if progress < plan.warmup:
        return max(progress / plan.warmup, 0.01)
    if progress < plan.decay_from:
        return 1.0
    return max((1.0 - progress) / (1.0 - plan.decay_from), 0.0)


def length(rng: Random, progress: float) -> int:
    """The row length of the next step."""
    shares = next(s for until, s in CURRICULUM if progress <= until or until == 1.0)
    return rng.choices(list(shares), list(shares.values()))[0]
