"""The GPU kernels alone: a layer's decode step against what the memory gives in the same run.

Boundary: top-k ids and weights in, combined bf16 rows out, routing included. Every step of a graph
has its own random experts, so the weights come from memory, never from the L2 cache. Times are of
whole graphs on the card's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moet.bench.timing import median
from moet.formats.mxint import ActFormat
from moet.kernels.cuda.gpu import Gpu
from moet.kernels.cuda.layer import CudaLayer, Step, workspace_of
from moet.kernels.cuda.plan import Tuning, plan_layer
from moet.kernels.cuda.synthetic import random_records
from moet.kernels.spec import DType, LayerSpec

V4_FLASH: Final = LayerSpec(
    hidden=4096, intermediate=2048, experts=256, top_k=6, act=ActFormat.MXINT8, limit=10.0
)
V41_FLASH: Final = LayerSpec(
    hidden=5120, intermediate=2304, experts=384, top_k=6, act=ActFormat.MXINT8, limit=10.0
)

READ_BYTES: Final = 2 << 30
STEPS: Final = 24
"""Steps of a graph."""

REPEATS: Final = 15
SCALES: Final = (118, 127)
"""Scale bytes as trained models have them."""

_DISTINCT_RECORDS: Final = 8
_WARM_UP: Final = 2


@dataclass(frozen=True)
class Timing:
    """One measurement.

    Attributes:
        tokens: of a step.
        what: ``step``, or one of its launches: ``quantise``, ``gate_up``, ``down``, ``combine``.
        microseconds: of one step or launch, the median over graphs of `STEPS`.
        experts: distinct ones a step, on average.
        nbytes: weight bytes a step reads, on average.
    """

    tokens: int
    what: str
    microseconds: float
    experts: float
    nbytes: float

    @property
    def bytes_per_s(self) -> float:
        """Weight bytes over time."""
        return self.nbytes / self.microseconds * 1e6


def read_bandwidth(gpu: Gpu, stream: int, repeats: int = REPEATS) -> float:
    """Bytes a second of the read-only kernel over `READ_BYTES`, the median."""
    buffer, sink = gpu.allocate(READ_BYTES), gpu.allocate(256)
    gpu.fill(buffer, 0x5B, READ_BYTES)
    try:
        times = [
            gpu.milliseconds(stream, lambda: gpu.read(buffer, READ_BYTES, sink, stream))
            for _ in range(_WARM_UP + repeats)
        ]
    finally:
        gpu.free(buffer)
        gpu.free(sink)
    return READ_BYTES / median(times[_WARM_UP:]) * 1e3


class Rig:
    """A layer of random experts on the card.

    Args:
        gpu: the card.
        spec: the layer; all its experts are made.
        most_tokens: of a step.
        seed: of experts and routings.
    """

    def __init__(self, gpu: Gpu, spec: LayerSpec, most_tokens: int = 64, seed: int = 0) -> None:
        self.gpu, self.spec, self.most_tokens = gpu, spec, most_tokens
        self.rng = np.random.default_rng(seed)
        self.stream = gpu.stream()
        self._held: list[int] = []
        self._table = self._make_experts()
        x = self.rng.standard_normal((most_tokens, spec.hidden)).astype(np.float32)
        self._x = self._upload((x.view(np.uint32) >> 16).astype(np.uint16))
        self._weights = self._upload(np.full((most_tokens, spec.top_k), 0.25, np.float32))
        self._out = self._allocate(2 * most_tokens * spec.hidden)

    def _allocate(self, nbytes: int) -> int:
        self._held.append(self.gpu.allocate(nbytes))
        return self._held[-1]

    def _upload(self, data: NDArray[Any]) -> int:
        address = self._allocate(data.nbytes)
        self.gpu.upload(address, data)
        return address

    def _make_experts(self) -> int:
        """Records: a few random ones, copied on the card; the table's address."""
        experts, size = self.spec.experts, self.spec.layout.record_bytes
        few = min(_DISTINCT_RECORDS, experts)
        sample = LayerSpec(
            hidden=self.spec.hidden, intermediate=self.spec.intermediate, experts=few, top_k=1,
            act=self.spec.act, biased=self.spec.biased,
        )  # fmt: skip
        records = self._allocate(experts * size)
        self.gpu.upload(records, random_records(self.rng, sample, SCALES))
        done = few
        while done < experts:
            more = min(done, experts - done)
            self.gpu.copy(records + done * size, records, more * size)
            done += more
        return self._upload(records + size * np.arange(experts, dtype=np.uint64))

    def layer(self, tuning: Tuning | None = None) -> CudaLayer:
        """A planned layer over the experts."""
        plan = plan_layer(self.spec, self.gpu.card, self.most_tokens, tuning)
        nbytes = workspace_of(self.spec, plan).nbytes
        workspace = self._allocate(nbytes)
        self.gpu.fill(workspace, 0, nbytes)
        return CudaLayer(
            self.spec, self.gpu.card, self.gpu, table=self._table, workspace=workspace,
            max_tokens=self.most_tokens, tuning=tuning,
        )  # fmt: skip

    def steps(self, tokens: int, count: int = STEPS) -> tuple[list[Step], float]:
        """Steps with random experts, distinct in a token; and a step's distinct ones on average."""
        steps, distinct = [], 0
        for _ in range(count):
            ids = np.stack(
                [self.rng.permutation(self.spec.experts)[: self.spec.top_k] for _ in range(tokens)]
            ).astype(np.int32)
            distinct += len(np.unique(ids))
            steps.append(
                Step(
                    x=self._x,
                    x_type=DType.BF16,
                    tokens=tokens,
                    ids=self._upload(ids),
                    weights=self._weights,
                    out=self._out,
                    out_type=DType.BF16,
                )
            )
        return steps, distinct / count

    def time(self, work: Callable[[], None], repeats: int = REPEATS) -> float:
        """Microseconds of the work, captured as a graph: the median over replays."""
        graph = self.gpu.capture(self.stream, work)
        times = [
            self.gpu.milliseconds(self.stream, graph.replay) for _ in range(_WARM_UP + repeats)
        ]
        graph.close()
        return 1e3 * median(times[_WARM_UP:])

    def measure(
        self, layer: CudaLayer, tokens: int, *, launches: bool = False, repeats: int = REPEATS
    ) -> list[Timing]:
        """A step's time; with `launches`, also each launch's, alone in a graph of its own."""
        steps, experts = self.steps(tokens)
        parts: dict[str, Callable[[Step], None]] = {"step": lambda s: layer.run(s, self.stream)}
        if launches:
            parts |= {
                "quantise": lambda s: layer.run_quantise(s, self.stream),
                "gate_up": lambda s: layer.run_gate_up(s, self.stream),
                "down": lambda s: layer.run_down(s, self.stream),
                "combine": lambda s: layer.run_combine(s, self.stream),
            }
        shares = {"step": 1.0, "gate_up": 2 / 3, "down": 1 / 3}
        return [
            Timing(
                tokens,
                what,
                self._time_steps(run, steps, repeats),
                experts,
                experts * self.spec.layout.payload_bytes * shares.get(what, 0.0),
            )
            for what, run in parts.items()
        ]

    def _time_steps(
        self, run: Callable[[Step], None], steps: Sequence[Step], repeats: int
    ) -> float:
        def all_steps() -> None:
            for step in steps:
                run(step)

        return self.time(all_steps, repeats) / len(steps)

    def close(self) -> None:
        """Gives all memory back."""
        for address in self._held:
            self.gpu.free(address)
