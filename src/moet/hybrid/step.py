"""THE HOT PATH of a machine with a card: one MoE layer, its experts on the card and on the CPU.

A step, all of it enqueued on one stream and fit for a CUDA graph (docs/decisions/mailbox.md):

    start:   post      x and the ids of experts that are elsewhere -> the CPU, which begins at once
             quantise, gate and up, down: rows of the experts that are on the card
      (the engine's shared expert may run here)
    finish:  wait      for the CPU's rows
             combine   all rows, in slot order

Every row has the same bits wherever it was computed, and the combine's order is that of the slots:
the split does not enter the result (docs/numerics.md).

transformers models run it (engine/transformers_card.py); vLLM's path is still experts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moet.hybrid.mailbox import Mailbox
from moet.hybrid.table import ExpertTable
from moet.kernels.cuda.layer import CudaLayer, Elsewhere, Step


class HybridLayer:
    """The routed experts of one layer on this rank's card and CPU.

    Args:
        index: of the layer, as attached to the mailbox.
        card: the layer's kernels, planned for steps of the mailbox's size, on the table's address.
        table: which experts are on the card.
        mailbox: the CPU's; None where no expert is ever elsewhere: then a step has no post.
    """

    def __init__(
        self, index: int, card: CudaLayer, table: ExpertTable, mailbox: Mailbox | None
    ) -> None:
        self.index = index
        self.spec = card.spec
        self.table = table
        self._card = card
        self._mailbox = mailbox
        self.most_tokens = card.plan.max_tokens
        """Of one step; `run` cuts longer calls."""

    def posts(self, tokens: int) -> int:
        """Posts of a call of so many tokens: what `Mailbox.announce` wants to know."""
        return -(-tokens // self.most_tokens) if self._mailbox else 0

    def start(self, step: Step, stream: int) -> None:
        """Enqueues the first half: x and the routing are read, rows are on their way.

        Raises:
            KernelError: more tokens than `most_tokens`, an address that is not aligned, a launch
                that the driver refuses.
        """
        slots = self._card.check(step)  # before anything is asked of the CPU
        if self._mailbox:
            self._mailbox.post(
                step,
                stream,
                index=self.index,
                table=self.table.address,
                spec=self.spec,
                slots=slots,
            )
        self._card.run_experts(step, stream)

    def finish(self, step: Step, stream: int) -> None:
        """Enqueues the second half: the output is there when the stream comes to its end.

        Raises:
            KernelError: a launch that the driver refuses.
        """
        if not self._mailbox:
            return self._card.run_combine(step, stream)
        self._mailbox.wait(stream, index=self.index, early=True)
        mail = self._mailbox.addresses
        step = replace(step, elsewhere=Elsewhere.ON_HOST, host_rows=mail.rows, failed=mail.failed)
        return self._card.run_combine(step, stream)

    def run(self, step: Step, stream: int) -> None:
        """Both halves, for any number of tokens."""
        for part in self._parts(step):
            self.start(part, stream)
            self.finish(part, stream)

    def _parts(self, step: Step) -> Iterator[Step]:
        slots = self.spec.top_k if step.slots is None else step.slots
        for first in range(0, step.tokens, self.most_tokens):
            yield replace(
                step,
                x=step.x + first * self.spec.hidden * step.x_type.nbytes,
                tokens=min(self.most_tokens, step.tokens - first),
                ids=step.ids + 4 * first * slots,
                weights=step.weights + 4 * first * slots,
                out=step.out + first * self.spec.hidden * step.out_type.nbytes,
            )
