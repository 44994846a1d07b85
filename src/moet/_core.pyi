"""moet's compiled core. Buffers are passed as addresses; their owner vouches for their size."""

from collections.abc import Sequence

class Refusal(Exception):  # noqa: N818 - arguments: (message, hint)
    ...

__version__: str
sanitized: bool

def cpu_features() -> dict[str, bool]: ...
def isa_available() -> list[str]: ...
def build_flags() -> dict[str, str]: ...

class Pool:
    def __init__(self, threads: int, cpus: Sequence[int]) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def cpus(self) -> list[int]: ...
    @property
    def thread_ids(self) -> list[int]: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def heartbeat(self) -> int: ...
    def set_heartbeat(self, address: int) -> None: ...

class ReadProbe:
    def __init__(self, pool: Pool, address: int, bytes: int) -> None: ...
    def run(self) -> float: ...

class Layer:
    def __init__(
        self,
        pool: Pool,
        isa: str,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        act: int,
        gate: int,
        limit: float | None,
        biased: bool,
        rows_bf16: bool,
        max_tokens: int,
    ) -> None: ...
    def bind(self, expert: int, address: int) -> None: ...
    def unbind(self, expert: int) -> None: ...
    def mark_foreign(self, expert: int) -> None: ...
    def run(
        self,
        x: int,
        x_type: int,
        tokens: int,
        weights: int,
        ids: int,
        slots: int,
        out: int,
        out_type: int,
        scale: float | None = None,
        ids_64: bool = False,
    ) -> None: ...
    @property
    def ran_isa(self) -> str | None: ...
    @property
    def record_bytes(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...

def repack_matrix(
    codes: int,
    code_stride: int,
    scales: int,
    scale_stride: int,
    rows: int,
    blocks: int,
    out: int,
    strip_stride: int,
    strips: int,
) -> int: ...
def quantised_bytes(blocks: int, act: int) -> int: ...
def quantise(isa: str, x: int, x_type: int, k: int, act: int, out: int) -> None: ...
def strip(isa: str, strip: int, blocks: int, xs: Sequence[int], act: int, out: int) -> None: ...
def gate(
    isa: str,
    kind: int,
    limit: float | None,
    gate_tot: int,
    up_tot: int,
    gate_bias: int,
    up_bias: int,
    n: int,
    h: int,
) -> None: ...
def finish_row(isa: str, row: int, bias: int, n: int, bf16_rows: bool) -> None: ...
def combine(
    isa: str,
    rows: Sequence[int],
    weights: int,
    n: int,
    scale: float | None,
    out_type: int,
    out: int,
) -> None: ...
def exp(isa: str, x: int, n: int, y: int) -> None: ...
def fmaf(a: int, b: int, c: int, n: int, out: int) -> None: ...
def multiply_add(a: int, b: int, c: int, n: int, out: int) -> None: ...
def exam_stall(pool: Pool, worker: int, milliseconds: int) -> None: ...
def exam_release(pool: Pool) -> None: ...
def exam_pool(
    pool: Pool, slots: int, items: int, spin: int = 0, throw_at: int = -1
) -> dict[str, object]: ...
