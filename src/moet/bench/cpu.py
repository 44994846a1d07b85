"""`moet bench cpu`: one MoE layer on this machine's cores, against what its memory can deliver.

Every figure stands beside the read bandwidth of the same minutes: passes of a plain read loop over
the same memory, by the same threads, alternate with the steps. Each step routes to new random
experts. Peers, where installed, take turns with moet on the same shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Protocol

from moet.base.errors import UsageError
from moet.bench import peers
from moet.bench.busy import busy_processes
from moet.bench.record import Record, Row, make_record
from moet.bench.rig import READ_BYTES, Rig, Shape
from moet.bench.timing import Sample, believable, median, percentile, pinned, timed
from moet.kernels.cpu import MOST_TOKENS, CpuLayer, Pool, choose_isa, default_cpus
from moet.kernels.spec import ActFormat

BLOCK = 5  # steps of one turn
BUSY_TURNS = 4
MOST_BUSY = 1000
MOST_SAMPLES = 100_000

Progress = Callable[[str, float], None]
"""Told what is being measured and the share done, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Attributes:
        shape: the layer.
        acts: activation formats.
        tokens: tokens a step.
        threads: threads of the pool; None: 1 and all cores.
        samples: steps a figure, at least; more where others disturb them.
        isa: forced vocabulary, empty = the best.
        busy: busy processes beside a second measurement of one token; 0 = none.
        busy_steps: steps with and without them.
        peers: names of peers to measure too; None: all that are installed.
        read_bytes: what a pass of the read loop touches, at least.
        seed: of weights and calls.
    """

    shape: Shape = field(default_factory=Shape)
    acts: tuple[ActFormat, ...] = (ActFormat.MXINT8, ActFormat.MXINT16)
    tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 64)
    threads: tuple[int, ...] | None = None
    samples: int = 15
    isa: str = ""
    busy: int = 0
    busy_steps: int = 200
    peers: tuple[str, ...] | None = None
    read_bytes: int = READ_BYTES
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (*self.tokens, *(self.threads or (1,)), self.samples, self.busy_steps)
        if min(counts) < 1 or self.busy < 0 or not self.tokens or not self.acts:
            raise UsageError(
                "tokens, threads, samples and steps are 1 or more",
                hint="moet bench cpu --tokens 1,8 --threads 1,2",
            )
        if max(self.tokens) > MOST_TOKENS:
            hint = "a step has no more: moet bench cpu --tokens 64"
            raise UsageError(f"{max(self.tokens)} tokens; {MOST_TOKENS} at most", hint=hint)
        if max(self.samples, self.busy_steps) > MOST_SAMPLES:
            hint = "15 are enough for a median: moet bench cpu --samples 15"
            raise UsageError(f"{self.samples} samples; {MOST_SAMPLES} at most", hint=hint)
        if self.busy > MOST_BUSY:
            hint = f"--busy {len(default_cpus())} keeps every CPU busy"
            raise UsageError(f"{self.busy} busy processes; {MOST_BUSY} at most", hint=hint)
        if unknown := set(self.peers or ()) - set(peers.installed()):
            raise UsageError(
                f"peer {sorted(unknown)[0]} is not installed",
                hint=f"installed here: {', '.join(peers.installed()) or 'none'}",
            )


class Contender(Protocol):
    """Something that can run the layer."""

    name: str

    def samples(self, tokens: int, count: int) -> list[Sample]:
        """Times `count` steps with new random experts each."""
        ...


@dataclass
class Moet:
    """moet with one activation format, as a contender."""

    name: str
    rig: Rig
    layer: CpuLayer

    def samples(self, tokens: int, count: int) -> list[Sample]:
        """Times `count` steps with new random experts each."""
        self.rig.step(self.layer, self.rig.work(tokens))()  # its workers sleep
        steps = (self.rig.step(self.layer, self.rig.work(tokens)) for _ in range(count))
        return [timed(step) for step in steps]


def run(options: Options, progress: Progress = lambda what, share: None) -> Record:
    """Measures. Takes a minute or more.

    Raises:
        UsageError: more threads than CPUs.
        MachineError: layer and calls do not fit in memory.
        KernelError: the forced vocabulary is absent, or a peer failed.
        MachineError: busy processes cannot be started.
        TierError: the kernel does not supply the memory.
    """
    isa = choose_isa(options.isa)
    threads = options.threads or tuple(sorted({1, Pool().threads}))
    if max(threads) > len(default_cpus()):
        hint = f"--threads 1,{Pool().threads}"
        raise UsageError(f"{max(threads)} threads on {len(default_cpus())} CPU(s)", hint=hint)
    rig = Rig(
        options.shape,
        max(options.tokens),
        options.seed,
        options.read_bytes,
        lambda done, of: progress("experts", done / of),
    )
    rows: list[Row] = []
    for count in threads:
        with ExitStack() as stack:
            bench = _Bench(options, rig, count, stack)
            stack.enter_context(pinned(bench.pool.cpus[0]))
            rows += bench.rows(progress)
    setup = asdict(options) | {"isa": isa, "threads": list(threads)}
    return make_record("cpu", setup | {"expert_bytes": rig.expert_bytes}, rows)


class _Bench:
    """The contenders with one number of threads. `stack` ends the peers' processes."""

    def __init__(self, options: Options, rig: Rig, threads: int, stack: ExitStack) -> None:
        self.options = options
        self.rig = rig
        self.threads = threads
        self.pool = Pool(threads)
        self._probe = rig.probe(self.pool)
        self.contenders: list[Contender] = [
            Moet(f"moet {act.name.lower()}", rig, rig.layer(act, self.pool, options.isa))
            for act in options.acts
        ]
        self.peers: list[peers.Peer] = []
        names = peers.installed() if options.peers is None else options.peers
        for name in names:
            peer = peers.Peer(name, options.shape, threads, max(options.tokens))
            self.peers.append(stack.enter_context(peer))
        self.contenders += self.peers

    def rows(self, progress: Progress) -> Iterator[Row]:
        """Measures everything, a row at a time."""
        speeds = len(self.options.tokens)
        jobs = speeds + (len(self.contenders) if self.options.busy else 0)
        for done, tokens in enumerate(self.options.tokens):
            progress(f"{self.threads} threads, {tokens} tokens", done / jobs)
            yield from self._speed(tokens)
        for done, contender in enumerate(self.contenders[: jobs - speeds], start=speeds):
            progress(f"{self.threads} threads, {contender.name}, busy", done / jobs)
            yield self._busy(contender)
        for peer in self.peers:
            yield {
                "kind": "peer",
                "who": peer.name,
                "threads": self.threads,
                "version": peer.version,
                "relative_error": peer.error,
                "same_layer": peer.error < peers.ERROR_LIMIT,
            }

    def _speed(self, tokens: int) -> list[Row]:
        """Turns of all contenders until each has enough quiet samples, or enough time went by."""
        wanted = self.options.samples
        steps: dict[str, list[Sample]] = {c.name: [] for c in self.contenders}
        reads: list[Sample] = []
        deadline = time.monotonic() + 4 * len(self.contenders)
        while True:
            for contender in self.contenders:
                reads.append(timed(self._probe.run))
                steps[contender.name] += contender.samples(tokens, BLOCK)
            fewest = min(len(s) for s in steps.values())
            quiet = min(sum(s.quiet for s in samples) for samples in steps.values())
            if fewest >= wanted and (quiet >= wanted or time.monotonic() > deadline):
                return [self._row(tokens, c.name, steps[c.name], reads) for c in self.contenders]

    def _row(
        self, tokens: int, who: str, samples: Sequence[Sample], reads: Sequence[Sample]
    ) -> Row:
        wanted = self.options.samples
        used = [s.seconds for s in believable(samples, wanted)]
        read = median([s.seconds for s in believable(reads, max(1, wanted // 2))])
        read_rate = self.rig.arena.bytes.size / read
        touched = self._expected_touched(tokens)
        rate = touched * self.rig.expert_bytes / median(used)
        return {
            "kind": "speed",
            "who": who,
            "threads": self.threads,
            "tokens": tokens,
            "experts": touched,
            "us": median(used) * 1e6,
            "gb_s": rate / 1e9,
            "read_gb_s": read_rate / 1e9,
            "ratio": rate / read_rate,
            "samples": len(samples),
            "quiet": sum(s.quiet for s in samples),
        }

    def _expected_touched(self, tokens: int) -> float:
        """Mean number of experts that a step touches: each token picks top_k of them at random."""
        shape = self.options.shape
        return shape.experts * (1 - (1 - shape.top_k / shape.experts) ** tokens)

    def _busy(self, contender: Contender) -> Row:
        """One token, alone and beside busy processes, in turns."""
        turn = -(-self.options.busy_steps // BUSY_TURNS)
        alone: list[Sample] = []
        busy: list[Sample] = []
        for _ in range(BUSY_TURNS):
            alone += contender.samples(1, turn)
            with busy_processes(self.options.busy, self.pool.cpus):
                busy += contender.samples(1, turn)
        row: Row = {"kind": "busy", "who": contender.name, "threads": self.threads}
        for name, samples in (("alone", alone), ("busy", busy)):
            seconds = [s.seconds for s in samples]
            row[f"{name}_median_us"] = median(seconds) * 1e6
            row[f"{name}_p95_us"] = percentile(seconds, 95) * 1e6
        return row | {
            "processes": self.options.busy,
            "steps": len(busy),
            "median_slowdown": row["busy_median_us"] / row["alone_median_us"],
            "p95_slowdown": row["busy_p95_us"] / row["alone_p95_us"],
        }
