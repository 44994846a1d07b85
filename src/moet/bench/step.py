"""`moet bench step`: hybrid layers against what card and CPU can do alone, all in one run.

For each way to wait, share of routings on the card and number of tokens, over new random experts in
every replay, a layer's

    step         all layers as one CUDA graph, card and CPU
    card alone   the same graph without post and wait, the CPU's rows taken to be there
    CPU alone    the same requests, answered without a card
    round trip   post, wait and combine where the CPU has next to nothing to do

The limit is 1.05 x the slower of the two alone, and 5 us; where the CPU is asked for rows, also the
round trip without what the CPU computes in it, which its time alone has already. Whatever is
extrapolated to a model's number of layers says so and counts the experts only.

The CPU alone and a plain read loop of its memory take turns with the steps: a host's memory is not
equally fast at all times. A step is timed twice: as one of many that lie ready, and launched when
the one before it is over, as in decode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from moet.base.errors import UsageError
from moet.bench import moe_gpu, step_rig
from moet.bench.record import Record, Row, make_record
from moet.bench.step_rig import Calls, StepRig, draw_calls, resident_count, tiny
from moet.bench.timing import median, percentile, pinned
from moet.hybrid.card import MAX_TOKENS
from moet.hybrid.mailbox import STALL_SECONDS, Variant
from moet.hybrid.synthetic import SyntheticExperts
from moet.kernels.cpu import Pool, ReadProbe, choose_isa
from moet.kernels.cuda.gpu import Graph
from moet.kernels.cuda.opened import OpenedCard
from moet.kernels.spec import LayerSpec
from moet.machine.cpu import usable_threads
from moet.tiers.arena import Arena

SLACK: Final = 1.05
SPARE_US: Final = 5.0
"""A layer may take `SLACK` x max(card, CPU) + the mail of a round trip + `SPARE_US`: `judged`."""

EXTRAPOLATED_LAYERS: Final = 40
READ_BYTES: Final = 4 << 30

WARM_UP: Final = 3
TURNS: Final = 5
"""Card and CPU together, the CPU alone on the same calls, a pass of its read loop: so often a row
of the table."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Attributes:
        spec: a layer.
        layers: of the graph.
        tokens: of a step, a list.
        percents: of routings whose experts are on the card, a list.
        variants: of waiting.
        replays: a figure, at least 50 for a record.
        cpu_passes: of the CPU alone a figure.
        read_bytes: of a pass of the host's read loop; 0 = 4 GiB.
        stall_seconds: of the mailbox.
        isa: forced CPU kernels, empty = the best.
        seed: of experts, calls and activations.
    """

    spec: LayerSpec = moe_gpu.V41_FLASH
    layers: int = 4
    tokens: tuple[int, ...] = (1, 4, 8, 16, 64)
    percents: tuple[int, ...] = (0, 25, 50, 75, 100)
    variants: tuple[Variant, ...] = (Variant.POLL,)
    replays: int = 50
    cpu_passes: int = 20
    read_bytes: int = 0
    stall_seconds: float = STALL_SECONDS
    isa: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (*self.tokens, self.layers, self.replays, self.cpu_passes)
        if not (self.tokens and self.percents and self.variants) or min(counts) < 1:
            hint = "moet bench step --tokens 1,8 --percent 0,50,100"
            raise UsageError("tokens, layers and replays are 1 or more", hint=hint)
        if max(self.tokens) > MAX_TOKENS:
            hint = f"a step has at most {MAX_TOKENS}; longer calls are cut into steps"
            raise UsageError(f"{max(self.tokens)} tokens", hint=hint)
        if not all(0 <= percent <= 100 for percent in self.percents):
            raise UsageError("--percent lies in 0..100", hint="moet bench step --percent 0,50,100")
        if self.spec.experts < 2 * self.spec.top_k:
            what = f"{self.spec.experts} experts of which a token takes {self.spec.top_k}"
            raise UsageError(what, hint="a layer to be split has twice as many, or more")


def run(
    card: OpenedCard,
    pool: Pool,
    options: Options,
    progress: Progress = lambda what, share: None,
) -> Record:
    """Measures.

    Raises:
        TierError: the experts do not fit into the host's memory, or those of the largest share not
            into the card's.
        StepError: a step failed.
        KernelError: the forced vocabulary is absent.
    """
    spec, layers = options.spec, options.layers
    specs = dict.fromkeys(range(layers), spec) | dict.fromkeys(
        range(layers, 2 * layers), tiny(spec)
    )
    experts = SyntheticExperts(
        specs, seed=options.seed, progress=lambda done, of: progress("experts", done / of)
    )
    try:
        bench = _Bench(card, pool, options, experts)
        rows = list(bench.rows(progress))
    finally:
        experts.close()
    return make_record("hybrid-step", _setup(card, pool, options, experts.nbytes), rows)


def _setup(card: OpenedCard, pool: Pool, options: Options, nbytes: int) -> dict[str, Any]:
    spec = options.spec
    return {
        "card": card.gpu.card.name,
        "hidden": spec.hidden,
        "intermediate": spec.intermediate,
        "experts": spec.experts,
        "distinct_experts": spec.experts * options.layers,
        "top_k": spec.top_k,
        "act": spec.act.name,
        "layers": options.layers,
        "expert_bytes": spec.layout.payload_bytes,
        "host_bytes": nbytes,
        "threads": pool.threads,
        "cores": usable_threads(),
        "isa": choose_isa(options.isa),
        "replays": options.replays,
        "seed": options.seed,
        "extrapolation": f"{EXTRAPOLATED_LAYERS} layers like the measured ones, experts only",
        "mode": "CUDA graph of all layers, new random experts in every replay, bf16 in and out",
    }


class _Bench:
    """One run over one set of experts."""

    def __init__(
        self,
        card: OpenedCard,
        pool: Pool,
        options: Options,
        experts: SyntheticExperts,
    ) -> None:
        self.card, self.pool = card, pool
        self.options, self.experts = options, experts
        self.rng = np.random.default_rng(options.seed)

    def rows(self, progress: Progress) -> Iterator[Row]:
        """The card's read rate, then every measured row."""
        with self._read_loop() as self.read:
            yield from self._rows(progress)

    def _rows(self, progress: Progress) -> Iterator[Row]:
        options, gpu = self.options, self.card.gpu
        card_read = moe_gpu.read_bandwidth(gpu, gpu.stream()) / 1e9
        yield {"kind": "read", "card_read_gb_s": card_read}
        jobs = len(options.variants) * len(options.percents)
        for number, variant in enumerate(options.variants):
            rig = self._rig(variant)
            try:
                for at, percent in enumerate(options.percents):
                    done = (number * len(options.percents) + at) / jobs
                    progress(f"{variant}, {percent} % on the card", done)
                    resident = rig.place(percent)
                    for tokens in options.tokens:
                        measure = _Measurement(self, rig, tokens, percent)
                        row = measure.row(card_read) | {"experts_on_card": resident}
                        yield {"kind": "step", "variant": str(variant)} | row
            finally:
                rig.close()

    @contextmanager
    def _read_loop(self) -> Iterator[ReadProbe]:
        """Over the experts, or over as many bytes of its own where they are too few."""
        wanted, tier = self.options.read_bytes or READ_BYTES, self.experts.tier
        if self.experts.nbytes >= wanted:
            yield ReadProbe(self.pool, tier.address_of(0), wanted)
            return
        arena = Arena(wanted, populate=True)
        try:
            yield ReadProbe(self.pool, arena.address, wanted)
        finally:
            arena.close()

    def _rig(self, variant: Variant) -> StepRig:
        options, spec = self.options, self.options.spec
        most = resident_count(spec, max(options.percents))
        return StepRig(
            self.card, self.pool, self.experts,
            capacity_bytes=options.layers * most * spec.layout.record_bytes,
            max_tokens=max(options.tokens), variant=variant, seed=options.seed,
            stall_seconds=options.stall_seconds, isa=options.isa,
        )  # fmt: skip


@dataclass
class _Turns:
    """What a row's turns have given.

    Attributes:
        laps: of the hybrid graph, microseconds a layer.
        busy: of them the CPU's, a mean.
        alone: the CPU without a card, microseconds a layer; empty where it is asked for nothing.
        reads: of the CPU's memory, bytes a second; as many as turns, or empty likewise.
    """

    laps: list[float] = field(default_factory=list)
    busy: float = 0.0
    alone: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)


class _Measurement:
    """One row."""

    def __init__(self, bench: _Bench, rig: StepRig, tokens: int, percent: int) -> None:
        self.bench, self.rig, self.tokens, self.percent = bench, rig, tokens, percent
        self.options = bench.options

    def row(self, card_read_gb_s: float) -> Row:
        """Measures it."""
        options, spec = self.options, self.options.spec
        calls = draw_calls(
            self.bench.rng, spec, count=options.replays + WARM_UP, layers=options.layers,
            tokens=self.tokens, percent=self.percent,
        )  # fmt: skip
        load = self.rig.pin(calls)
        try:
            turns = self._in_turns(load, calls)
            single = self._one_at_a_time(load)
            card = self._alone(self.rig.card_graph(self.tokens), load)
            trip, in_trip = self._round_trip(1, 1)
            moved, _ = self._round_trip(self.tokens, self._asked())
        finally:
            self.rig.release_calls()
        row: Row = {
            "tokens": self.tokens,
            "percent": self.percent,
            "on_card": calls.on_card,
            "card_experts": calls.card_experts,
            "cpu_experts": calls.cpu_experts,
            "step_us": median(turns.laps),
            "step_p95_us": percentile(turns.laps, 95),
            "one_at_a_time_us": single,
            "card_us": median(card),
            "cpu_us": median(turns.alone) if turns.alone else 0.0,
            "cpu_read_gb_s": median(turns.reads) / 1e9 if turns.reads else 0.0,
            "cpu_in_step_us": turns.busy,
            "round_trip_us": trip,
            "cpu_in_round_trip_us": in_trip,
            "round_trip_all_rows_us": moved,
        }
        return row | judged(row) | _rates(row, spec.layout.payload_bytes, card_read_gb_s)

    def _asked(self) -> int:
        """Slots of a token that the CPU has, rounded."""
        top_k = self.options.spec.top_k
        return min(top_k, round(top_k * (100 - self.percent) / 100))

    def _laps(
        self, graph: Graph, posts: int, load: Callable[[int], None], numbers: range
    ) -> list[float]:
        """Microseconds a layer of the replays of these calls; a few before them are not counted."""
        mailbox, first = self.rig.mailbox, numbers.start - WARM_UP

        def replay(number: int) -> None:
            if posts:
                mailbox.announce(posts)
            graph.replay()

        count = len(numbers) + WARM_UP
        laps = self.rig.gpu.laps(self.rig.stream, count, lambda n: load(first + n), replay)
        mailbox.check()
        return [1e3 * lap / self.options.layers for lap in laps[WARM_UP:]]

    def _alone(self, graph: Graph, load: Callable[[int], None]) -> list[float]:
        """Laps of a graph that asks nobody; closes it."""
        laps = self._laps(graph, 0, load, self._numbers)
        graph.close()
        return laps

    @property
    def _numbers(self) -> range:
        return range(WARM_UP, WARM_UP + self.options.replays)

    def _in_turns(self, load: Callable[[int], None], calls: Calls) -> _Turns:
        """A few replays of the hybrid graph, then the same calls without a card, then a pass of the
        read loop, and so on."""
        graph, posts = self.rig.hybrid_graph(self.tokens)
        numbers, each = self._numbers, -(-self.options.replays // TURNS)
        turns = _Turns()
        for start in range(numbers.start, numbers.stop, each):
            turn = range(start, min(start + each, numbers.stop))
            laps, busy = self._answered(graph, posts, load, turn)
            turns.laps += laps
            turns.busy += busy * len(turn) / len(numbers)
            if (calls.asked >= 0).any():
                self._cpu(calls, turn, turns)
        graph.close()
        return turns

    def _one_at_a_time(self, load: Callable[[int], None]) -> float:
        """Microseconds a layer where each step is launched when the one before it is over, as in
        decode: launch and wake-up included."""
        mailbox, rig = self.rig.mailbox, self.rig
        graph, posts = rig.hybrid_graph(self.tokens)
        singles = []
        for number in range(self.options.cpu_passes):
            load(number)
            rig.gpu.synchronise()
            start = time.perf_counter()
            mailbox.announce(posts)
            graph.replay()
            rig.gpu.synchronise()
            singles.append(time.perf_counter() - start)
            mailbox.check()
        graph.close()
        return 1e6 * median(singles) / self.options.layers

    def _answered(
        self, graph: Graph, posts: int, load: Callable[[int], None], numbers: range
    ) -> tuple[list[float], float]:
        """A graph's laps, and microseconds that the CPU spent in one of its answers."""
        mailbox = self.rig.mailbox
        busy, answered = mailbox.busy_seconds, mailbox.answered
        laps = self._laps(graph, posts, load, numbers)
        answers = mailbox.answered - answered
        return laps, 1e6 * (mailbox.busy_seconds - busy) / answers if answers else 0.0

    def _cpu(self, calls: Calls, numbers: range, turns: _Turns) -> None:
        """The CPU alone, for some of these calls, and what its memory delivers then."""
        most = -(-self.options.cpu_passes // TURNS)
        chosen = numbers[:: max(1, len(numbers) // most)][:most]
        with pinned(self.rig.pool.cpus[0]):
            self.rig.answer_alone(calls, numbers.start)
            for number in chosen:
                start = time.perf_counter()
                self.rig.answer_alone(calls, number)
                turns.alone.append(1e6 * (time.perf_counter() - start) / self.options.layers)
            turns.reads.append(self.bench.read.run())

    def _round_trip(self, tokens: int, asked: int) -> tuple[float, float]:
        """Microseconds of a post, its answer and a combine; and the CPU's of them."""
        graph, posts = self.rig.mail_graph(tokens, asked)
        laps, answer = self._answered(graph, posts, lambda number: None, self._numbers)
        graph.close()
        return median(laps) * self.options.layers / step_rig.ROUND_TRIPS, answer


def judged(row: Row) -> Row:
    """What follows from a row's times: the wait, the limit, the step's share of it.

    The round trip's own compute is not in the limit: the CPU's time alone has what is computed.
    Where nobody is asked for a row there is no mail to wait for.
    """
    mail = row["round_trip_us"] - row["cpu_in_round_trip_us"] if row["cpu_experts"] else 0.0
    limit = SLACK * max(row["card_us"], row["cpu_us"]) + mail + SPARE_US
    return {
        "wait_us": max(0.0, row["step_us"] - row["card_us"]),
        "limit_us": limit,
        "ratio": row["step_us"] / limit,
        "holds": row["step_us"] <= limit,
        "extrapolated_ms": row["step_us"] * EXTRAPOLATED_LAYERS / 1e3,
    }


def _rates(row: Row, expert_bytes: int, card_read_gb_s: float) -> Row:
    """Bytes of experts over times, beside what the memories deliver."""

    def rate(experts: float, us: float) -> float:
        return experts * expert_bytes / us / 1e3 if us else 0.0

    def of_reads(gb_s: float) -> float:
        return gb_s / row["cpu_read_gb_s"] if gb_s else 0.0

    cpu, card = rate(row["cpu_experts"], row["cpu_us"]), rate(row["card_experts"], row["card_us"])
    return {
        "cpu_gb_s": cpu,
        "cpu_read_share": of_reads(cpu),
        "cpu_read_share_in_step": of_reads(rate(row["cpu_experts"], row["step_us"])),
        "card_gb_s": card,
        "card_read_share": card / card_read_gb_s,
    }
