"""Which cores the pool of one worker gets.

vLLM's CPU worker starts with all its threads bound to the OpenMP place that the engine gave it, on
a small machine a single core. moet's pool sets its own affinity, so it has to know what the user
allowed: the affinity of the process that started the worker.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence

from moet.base.errors import UsageError
from moet.engine import versions
from moet.machine.cgroup import cpu_quota
from moet.machine.cpu import one_per_core, parse_cpu_list, usable_cpus


def share(cpus: Sequence[int], rank: int, world: int) -> tuple[int, ...]:
    """A contiguous part of ``cpus`` for ``rank`` of ``world``; one at least, shared if scarce."""
    first, last = rank * len(cpus) // world, (rank + 1) * len(cpus) // world
    return tuple(cpus[first:last]) or (cpus[rank % len(cpus)],)


def of_rank(rank: int, world: int) -> tuple[int, ...]:
    """CPUs for the pool of a worker, the ones that the calling thread may use first.

    A list in VLLM_CPU_OMP_THREADS_BIND is obeyed; else one logical CPU of each usable core, the
    ranks sharing them evenly.

    Raises:
        UsageError: that list has no part for this rank.
    """
    binding = versions.thread_binding()
    if binding not in ("auto", "nobind"):
        parts = binding.split("|")
        if rank >= len(parts):
            hint = f"give {world} lists of CPUs, separated by |"
            raise UsageError(f"VLLM_CPU_OMP_THREADS_BIND={binding!r}", hint=hint)
        return parse_cpu_list(parts[rank])
    starter = multiprocessing.parent_process()
    cpus = one_per_core(usable_cpus(pid=starter.pid if starter and starter.pid else "self"))
    mine = set(usable_cpus())
    return tuple(sorted(share(cpus, rank, world), key=lambda cpu: cpu not in mine))


def threads(cpus: Sequence[int], asked: int, world: int) -> int:
    """Threads of a pool on ``cpus``: as many as asked for, else one a CPU within the quota."""
    quota = cpu_quota()
    fed = len(cpus) if quota is None else max(1, int(quota / world))
    return asked or min(len(cpus), fed)
