"""The routed experts of one layer on a GPU: plan, then run. Same bits as `kernels.reference`.

Four launches a step, no host in between and nothing allocated: it can be captured in a CUDA graph.
A step has two halves, so that rows computed elsewhere (by the CPU) can join before the combine:
`run_experts` fills the rows of experts whose records are on the card, `run_combine` adds all rows.

The expert table [E] u64 in device memory says where each expert is: the address of its record, or
`ELSEWHERE` (somebody else writes its rows), or `FOREIGN` (another rank's: its slots are skipped).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

from moet.base.errors import KernelError
from moet.kernels.cuda.params import CombineParams, Params, QuantiseParams, StageParams
from moet.kernels.cuda.plan import Card, LayerPlan, StagePlan, Tuning, plan_layer
from moet.kernels.spec import DType, LayerSpec

ELSEWHERE: Final = 0
FOREIGN: Final = 1

_THREADS: Final = 128
_ALIGNMENT: Final = 256
_ROW_ALIGNMENT: Final = 16


class Elsewhere(IntEnum):
    """Where the combine finds the rows of experts that are not on the card."""

    NOWHERE = 0
    IN_ROWS = 1
    ON_HOST = 2


class Launcher(Protocol):
    """What runs kernels: a card's driver, or the tests' CPU stand-in."""

    def launch(
        self,
        kernel: str,
        params: Params,
        *,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        overlap: bool,
    ) -> None:
        """Enqueues one kernel. `params` may be reused as soon as this returns."""


@dataclass(frozen=True)
class Workspace:
    """Device memory of a layer's steps, given by offsets into one allocation.

    Layers that never run at the same time may share it: nothing in it outlives a step.
    """

    token_rows: int
    routing_rows: int
    rows: int
    status: int
    nbytes: int


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def workspace_of(spec: LayerSpec, plan: LayerPlan) -> Workspace:
    """The layout of a layer's workspace."""
    routings = plan.max_tokens * spec.top_k
    token_rows = 0
    routing_rows = token_rows + _aligned(plan.max_tokens * plan.token_row_bytes)
    rows = routing_rows + _aligned(routings * plan.routing_row_bytes)
    status = rows + _aligned(4 * routings * spec.hidden)
    return Workspace(token_rows, routing_rows, rows, status, status + _ALIGNMENT)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call, by device addresses; everything contiguous.

    Attributes:
        x: [T, H] of `x_type`, 16-byte aligned.
        tokens: T, 1..max_tokens.
        ids: int32 [T, slots]; negative = empty slot.
        weights: fp32 [T, slots].
        out: [T, H] of `out_type`.
        slots: a token's, at most top_k; None = top_k.
        elsewhere: where the rows of experts are that the table marks ELSEWHERE when the combine
            runs. NOWHERE: such a slot makes its token NaN and is counted in the status word.
        host_rows: with ON_HOST, mapped host memory: [T * slots, H], bf16 where the spec's rows are,
            else fp32.
        failed: with ON_HOST, device address of a u32 that is not 0 where those rows will not come:
            then such slots are as with NOWHERE.
    """

    x: int
    x_type: DType
    tokens: int
    ids: int
    weights: int
    out: int
    out_type: DType
    slots: int | None = None
    elsewhere: Elsewhere = Elsewhere.NOWHERE
    host_rows: int = 0
    failed: int = 0


class CudaLayer:
    """A layer planned for a card.

    Args:
        spec: the layer.
        card: the GPU.
        launcher: runs the kernels.
        table: device address of the expert table, u64 [E]. The owner may change entries between
            steps, in stream order.
        workspace: device address of `workspace_of(...).nbytes` zeroed bytes, aligned to 256.
        max_tokens: of a step.
        tuning: choices of speed.

    Raises:
        KernelError: the plan does not fit the card.
    """

    def __init__(
        self,
        spec: LayerSpec,
        card: Card,
        launcher: Launcher,
        *,
        table: int,
        workspace: int,
        max_tokens: int = 64,
        tuning: Tuning | None = None,
    ) -> None:
        self.spec = spec
        self.plan = plan_layer(spec, card, max_tokens, tuning)
        self.parts = workspace_of(spec, self.plan)
        self._launcher = launcher
        self._workspace = workspace
        self._table = table
        self._quantise = self._quantise_params()
        self._gate_up = self._gate_up_params()
        self._down = self._down_params()
        self._combine = self._combine_params()

    @property
    def rows(self) -> int:
        """Device address of the rows, fp32 [T * K, H]: where rows of ELSEWHERE experts go."""
        return self._workspace + self.parts.rows

    @property
    def status(self) -> int:
        """Device address of the status word, u32: slots so far that nobody could compute."""
        return self._workspace + self.parts.status

    def _quantise_params(self) -> QuantiseParams:
        return QuantiseParams(
            rows=self._workspace + self.parts.token_rows,
            hidden=self.spec.hidden,
            groups=-(-self.spec.hidden // 128),
            act=int(self.spec.act),
        )

    def _stage_params(self, plan: StagePlan) -> StageParams:
        return StageParams(
            table=self._table,
            experts=self.spec.experts,
            depth=plan.depth,
            sum_columns=plan.sum_columns,
            gate=int(self.spec.gate),
            limit=float("inf") if self.spec.limit is None else self.spec.limit,
        )

    def _gate_up_params(self) -> StageParams:
        spec, layout = self.spec, self.spec.layout
        params = self._stage_params(self.plan.gate_up)
        params.in_rows = self._workspace + self.parts.token_rows
        params.out = self._workspace + self.parts.routing_rows
        params.blocks = spec.hidden // 32
        params.section = layout.gate_strip(0)
        params.pairs = spec.intermediate // 16
        params.out_size = -(-spec.intermediate // 128)
        if spec.biased:
            params.bias, params.second_bias = layout.gate_bias, layout.up_bias
        return params

    def _down_params(self) -> StageParams:
        spec, layout = self.spec, self.spec.layout
        params = self._stage_params(self.plan.down)
        params.in_rows = self._workspace + self.parts.routing_rows
        params.out = self.rows
        params.in_divisor = 1
        params.blocks = spec.intermediate // 32
        params.section = layout.down_strip(0)
        params.pairs = spec.hidden // 32
        params.out_size = spec.hidden
        if spec.biased:
            params.bias = layout.down_bias
        return params

    def _combine_params(self) -> CombineParams:
        scale = self.spec.output_scale
        return CombineParams(
            table=self._table,
            rows=self.rows,
            status=self.status,
            experts=self.spec.experts,
            hidden=self.spec.hidden,
            has_scale=scale is not None,
            scale=1.0 if scale is None else scale,
        )

    def run(self, step: Step, stream: int = 0) -> None:
        """Both halves.

        Raises:
            KernelError: as `run_experts`.
        """
        self.run_experts(step, stream)
        self.run_combine(step, stream)

    def run_experts(self, step: Step, stream: int = 0) -> None:
        """Fills the rows of the routings whose experts are on the card.

        Raises:
            KernelError: T is not in 1..max_tokens, x is not aligned, the driver refuses a launch.
        """
        self.run_quantise(step, stream)
        self.run_gate_up(step, stream)
        self.run_down(step, stream)

    def run_quantise(self, step: Step, stream: int = 0) -> None:
        """x -> quantised rows of the tokens."""
        self.check(step)
        params = self._quantise
        params.x, params.x_type, params.tokens = step.x, int(step.x_type), step.tokens
        grid = (-(-16 * params.groups // _THREADS), step.tokens)
        self._launch("moet_quantise", params, stream, grid=grid)

    def run_gate_up(self, step: Step, stream: int = 0) -> None:
        """Quantised rows of tokens -> quantised h of routings."""
        self._gate_up.in_divisor = self.check(step)
        self._run_stage("gate_up", self._gate_up, self.plan.gate_up, step, stream)

    def run_down(self, step: Step, stream: int = 0) -> None:
        """Quantised h of routings -> rows."""
        self._run_stage("down", self._down, self.plan.down, step, stream)

    def _run_stage(
        self, name: str, params: StageParams, plan: StagePlan, step: Step, stream: int
    ) -> None:
        params.ids, params.routings = step.ids, step.tokens * self.check(step)
        kernel = f"moet_{name}_{int(self.spec.act)}"
        self._launch(
            kernel,
            params,
            stream,
            grid=(plan.blocks, 1),
            threads=32 * plan.warps,
            shared_bytes=plan.shared_bytes,
        )

    def run_combine(self, step: Step, stream: int = 0) -> None:
        """Adds all rows, in slot order, into the output."""
        slots = self.check(step)
        combine = self._combine
        combine.ids, combine.weights, combine.out = step.ids, step.weights, step.out
        combine.tokens, combine.top_k, combine.out_type = step.tokens, slots, int(step.out_type)
        combine.elsewhere, combine.host_bf16 = int(step.elsewhere), self.spec.rows_bf16
        combine.host_rows, combine.failed = step.host_rows, step.failed
        grid = (-(-self.spec.hidden // (4 * _THREADS)), step.tokens)
        self._launch("moet_combine", combine, stream, grid=grid)

    def _launch(
        self,
        kernel: str,
        params: Params,
        stream: int,
        *,
        grid: tuple[int, int],
        threads: int = _THREADS,
        shared_bytes: int = 0,
    ) -> None:
        self._launcher.launch(
            kernel,
            params,
            grid=grid,
            threads=threads,
            shared_bytes=shared_bytes,
            stream=stream,
            overlap=self.plan.overlap,
        )

    def check(self, step: Step) -> int:
        """Slots of a token of the step.

        Raises:
            KernelError: T is not in 1..max_tokens, slots not in 1..top_k, or x is not aligned.
        """
        slots = self.spec.top_k if step.slots is None else step.slots
        if not 1 <= step.tokens <= self.plan.max_tokens:
            raise KernelError(
                f"a step of {step.tokens} tokens on a layer planned for {self.plan.max_tokens}",
                hint="cut longer calls into steps",
            )
        if not 1 <= slots <= self.spec.top_k:
            raise KernelError(
                f"a step of {slots} slots a token on a layer of top_k = {self.spec.top_k}",
                hint="slots lie in 1..top_k",
            )
        if step.x % _ROW_ALIGNMENT:
            raise KernelError(
                f"x at {step.x:#x} is not aligned to {_ROW_ALIGNMENT} bytes",
                hint="pass a contiguous tensor of its own",
            )
        return slots
