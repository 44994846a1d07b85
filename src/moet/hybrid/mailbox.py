"""The mailbox between a captured step on the card and the CPU's workers.

Both ends in one object: `kernels.cuda.mail` posts and waits on the card, `moet._core.Mailbox`
answers on the CPU. Between them lie one page of words, the tokens and the rows, in pinned host
memory. The protocol is in docs/decisions/mailbox.md.

How the card waits is a variant:

    poll      a kernel reads the answer's word over PCIe; the CPU's conductor polls the doorbell
    memop     the stream's own memory operation waits; otherwise as poll
    hostfunc  a host function of the stream hands the request over and returns with the answer;
              nobody polls

All three end in the same check on the card, so a failure has one meaning: rows that will not come
are NaN in the output, and `check` raises.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, Final, Protocol

from moet import _core
from moet.base.errors import KernelError, MachineError, StepError
from moet.kernels.cpu import CpuLayer, Pool
from moet.kernels.cuda.layer import Launcher, Step
from moet.kernels.cuda.mail import (
    FAILED_AT,
    GATE_AT,
    GIVEN_UP_AT,
    STATE_BYTES,
    CudaMail,
    MailAddresses,
)
from moet.kernels.spec import LayerSpec

STALL_SECONDS: Final = 0.7
"""An answer without progress for so long is given up; ten times that where the machine is so busy
that the workers could not run."""

_CARD_PATIENCE: Final = 12
"""The card's own limit, in times the CPU's: it speaks only where the CPU's guard cannot."""

_ALIGNMENT: Final = 4096


class Variant(StrEnum):
    """How the card waits for the CPU."""

    POLL = "poll"
    MEMOP = "memop"
    HOSTFUNC = "hostfunc"


class Verdict(IntEnum):
    """Why nobody answers any more. The values are those of csrc/runtime/mailpage.h."""

    DONE = 0
    REFUSED = 1
    STALLED = 2
    CORRUPT = 3
    STOPPED = 4
    UNANNOUNCED = 5


_MEANING: Final = {
    Verdict.REFUSED: "the CPU's share of a layer was refused",
    Verdict.STALLED: "the CPU's share of a layer did not come",
    Verdict.CORRUPT: "a word of the mailbox was overwritten",
    Verdict.STOPPED: "the mailbox was closed while a step ran",
    Verdict.UNANNOUNCED: "a step ran that the CPU was not told of",
}

_HINTS: Final = {
    Verdict.REFUSED: "bind every expert that is not on the card",
    Verdict.STALLED: "look for stopped or starved threads named moet-*, or set MOET_THREADS lower",
    Verdict.CORRUPT: "report this: something writes into memory that is not its own",
    Verdict.STOPPED: "close it after the last step",
    Verdict.UNANNOUNCED: "call announce before every step that is enqueued or replayed",
}


class MailCard(Launcher, Protocol):
    """What a mailbox needs of a GPU."""

    def allocate(self, nbytes: int) -> int: ...  # noqa: D102
    def free(self, address: int) -> None: ...  # noqa: D102
    def fill(self, address: int, byte: int, nbytes: int) -> None: ...  # noqa: D102
    def stream(self) -> int: ...  # noqa: D102


class MailLink(Protocol):
    """What a mailbox needs of a GPU's host link: `kernels.cuda.link.Link` has it."""

    def pinned(self, nbytes: int) -> int: ...  # noqa: D102
    def free_pinned(self, address: int) -> None: ...  # noqa: D102
    def capturing(self, stream: int) -> bool: ...  # noqa: D102
    def event(self) -> Any: ...  # noqa: D102
    def free_event(self, event: Any) -> None: ...  # noqa: D102
    def follow(self, stream: int, leader: int, event: Any) -> None: ...  # noqa: D102
    def wait_for_word(self, stream: int, address: int, value: int) -> None: ...  # noqa: D102
    def host_function(self, stream: int, function: int, data: int) -> None: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class MailSizes:
    """What the largest step of any layer needs.

    Attributes:
        tokens: T of a step.
        slots: of a token.
        hidden: H.
        row_bytes: of an element of a row: 2 (bf16) or 4 (fp32).
    """

    tokens: int
    slots: int
    hidden: int
    row_bytes: int

    @classmethod
    def of(cls, spec: LayerSpec, tokens: int) -> MailSizes:
        """Of one layer; layers of one model differ in none of these."""
        row = 2 if spec.rows_bf16 else 4
        return cls(tokens=tokens, slots=spec.top_k, hidden=spec.hidden, row_bytes=row)

    def parts(self) -> tuple[int, int, int, int]:
        """Bytes of the page, x, the ids and the rows."""
        routings = self.tokens * self.slots
        x = 4 * self.tokens * self.hidden
        rows = self.row_bytes * routings * self.hidden
        return _core.MAIL_PAGE_BYTES, x, 4 * routings, rows


class Mailbox:
    """One stream's mailbox. Layers attach to it; steps are announced, and checked at their end.

    Args:
        card: the GPU.
        link: its host link.
        pool: the CPU's workers; the mailbox's own thread is worker 0, so nobody else may use it
            while a step is in flight.
        sizes: of the largest step.
        variant: how the card waits.
        stall_seconds: an answer without progress for so long is given up.

    Raises:
        KernelError: no memory, a limit of locked memory, or the pool has a mailbox already.
    """

    def __init__(
        self,
        card: MailCard,
        link: MailLink,
        pool: Pool,
        *,
        sizes: MailSizes,
        variant: Variant = Variant.POLL,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self.variant, self.sizes = variant, sizes
        self._card, self._link = card, link
        self._announced = 0
        self._recorded: int | None = None
        self._open: int | None = None
        self._claim_memory()
        a = self.addresses
        try:
            self.core = _core.Mailbox(
                pool.core, a.page, a.x, a.ids, a.rows, sizes.tokens, sizes.slots, stall_seconds,
                variant is not Variant.HOSTFUNC,
            )  # fmt: skip
        except _core.Refusal as refusal:
            card.free(self._state)
            link.free_pinned(self._pinned)
            raise KernelError(refusal.args[0], hint=refusal.args[1]) from None
        self._kernels = CudaMail(
            card, a, patience_seconds=_CARD_PATIENCE * stall_seconds, overlap=True
        )
        self._side = card.stream() if variant is Variant.HOSTFUNC else 0
        self._events = [link.event() for _ in range(2)] if self._side else []

    def _claim_memory(self) -> None:
        offsets, end = [], 0
        for nbytes in self.sizes.parts():
            offsets.append(end)
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._pinned = self._link.pinned(end)
        ctypes.memset(self._pinned, 0, end)
        self._state = self._card.allocate(STATE_BYTES)
        self._card.fill(self._state, 0, STATE_BYTES)
        page, x, ids, rows = (self._pinned + offset for offset in offsets)
        self.addresses = MailAddresses(page=page, x=x, ids=ids, rows=rows, state=self._state)

    def attach(self, index: int, layer: CpuLayer) -> None:
        """Lets the CPU answer for a layer with `layer`, which must have every expert that the card
        may ask for bound.

        Raises:
            KernelError: a step is in flight, or the layer does not fit the mailbox.
        """
        spec = layer.spec
        if MailSizes.of(spec, self.sizes.tokens) != self.sizes:
            raise KernelError(
                f"a layer of {spec} in a mailbox made for {self.sizes}",
                hint="layers of one mailbox agree in hidden size, top-k and activation format",
            )
        layer.attach_to(self.core, index)

    # ---- the step's hooks

    def announce(self, posts: int) -> None:
        """A step of so many posts is about to be enqueued or replayed: wakes the CPU's workers,
        which poll until its last post. Call it just before every step, or never: an eager layer
        that was not announced announces itself, at the price of a wake-up a layer."""
        self._announced = posts
        self.core.begin(posts)

    @contextmanager
    def recording(self) -> Iterator[list[int]]:
        """While a graph is captured: gives a list that holds, at the end, the graph's posts, to be
        announced before each replay."""
        posts: list[int] = []
        self._recorded = 0
        try:
            yield posts
        finally:
            posts.append(self._recorded)
            self._recorded = None

    def check(self) -> None:
        """Call it when a step's results have arrived, before any of them is used.

        Raises:
            StepError: rows did not come; the step's output has NaN in their place. The mailbox
                stays out of order until `reset`.
        """
        verdict = Verdict(self.core.verdict)
        given_up = ctypes.c_uint32.from_address(self.addresses.page + GIVEN_UP_AT).value
        if verdict is Verdict.DONE and given_up:
            verdict = Verdict(given_up)
        if verdict is not Verdict.DONE:
            words = self.core.message or "the card gave up waiting"
            hint = self.core.hint or _HINTS[verdict]
            raise StepError(f"{_MEANING[verdict]}: {words}", hint=hint)

    def settle(self) -> None:
        """The card is idle: posts that were announced and never came are not waited for. For a step
        that failed half-way."""
        self._announced, self._open = 0, None
        self.core.settle()

    def reset(self) -> None:
        """Back in order after a failure. The card must be idle.

        Raises:
            KernelError: a worker is still stuck in a layer.
        """
        self._announced, self._open = 0, None
        try:
            self.core.reset()
        except _core.Refusal as refusal:
            raise KernelError(refusal.args[0], hint=refusal.args[1]) from None
        self._card.fill(self._state + FAILED_AT, 0, 4)

    # ---- a layer's part of a step

    def post(self, step: Step, stream: int, *, index: int, table: int, spec: LayerSpec,
             slots: int) -> None:  # fmt: skip
        """Enqueues a layer's request: x and the ids of experts that are elsewhere.

        Raises:
            KernelError: another layer's rows have not been waited for: they lie where this one's
                would.
        """
        if self._open not in {None, index}:
            raise KernelError(
                f"layer {index} starts before layer {self._open} of the same mailbox has ended",
                hint="one layer at a time: finish it, then start the next",
            )
        self._open = index
        self._count(stream)
        self._kernels.post(
            step, stream, index=index, table=table, experts=spec.experts, hidden=spec.hidden,
            slots=slots,
        )  # fmt: skip
        if self.variant is Variant.HOSTFUNC:
            self._link.follow(self._side, stream, self._events[0])
            self._link.host_function(self._side, _core.answer_now_function(), self.core.address)

    def wait(self, stream: int, *, index: int, early: bool) -> None:
        """Enqueues the wait for a layer's rows. `early`: kernels were enqueued since the post.

        Raises:
            KernelError: it is not this layer that has posted last.
        """
        if self._open != index:
            raise KernelError(
                f"layer {index} ends, but layer {self._open} is the one that has started",
                hint="start and finish a layer before the next one starts",
            )
        self._open = None
        polls = self.variant is Variant.POLL
        if self.variant is Variant.HOSTFUNC:
            self._link.follow(stream, self._side, self._events[1])
        if self.variant is Variant.MEMOP:
            self._link.wait_for_word(stream, self.addresses.page + GATE_AT, 1)
        self._kernels.wait(stream, early=early and polls, overlap=polls)

    def _count(self, stream: int) -> None:
        if self._recorded is not None and self._link.capturing(stream):
            self._recorded += 1
        elif self._announced:
            self._announced -= 1
        elif not self._link.capturing(stream):
            self.core.begin(1)

    # ---- figures

    @property
    def answered(self) -> int:
        """Requests that the CPU has answered."""
        return self.core.answered

    @property
    def busy_seconds(self) -> float:
        """Time that the CPU has spent in answers."""
        return self.core.busy_ns / 1e9

    def close(self) -> None:
        """Stops the CPU's end and gives the memory back. The card must be idle.

        Raises:
            MachineError: a thread is stuck in a layer; its memory is kept, since it may yet write.
        """
        if not self._pinned:
            return
        pinned, self._pinned = self._pinned, 0
        for event in self._events:
            self._link.free_event(event)
        self._card.free(self._state)
        if not self.core.close():
            raise MachineError(
                "a worker of the CPU tier is stuck in a layer and cannot be stopped",
                hint="end the process",
            )
        self._link.free_pinned(pinned)
