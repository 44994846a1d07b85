"""The card's end of the mailbox: `moet_post` and `moet_wait`, launched (device/mail.cuh).

A step that needs experts of the CPU is: post, the experts that are on the card, wait, combine. The
CPU's end is `moet._core.Mailbox`; `hybrid.mailbox` owns both.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

from moet.base.errors import KernelError
from moet.kernels.cuda.layer import Launcher, Step
from moet.kernels.cuda.params import MailState, PostParams, WaitParams

STATE_BYTES: Final = ctypes.sizeof(MailState)
FAILED_AT: Final = MailState.failed.offset
GATE_AT: Final = 320
"""Offset in the page of the word that is 1 when there is nothing to wait for."""
GIVEN_UP_AT: Final = 384
"""Offset in the page of the word that says why the card gave up waiting."""

_POST_THREADS: Final = 256
_WAIT_THREADS: Final = 32


@dataclass(frozen=True, kw_only=True)
class MailAddresses:
    """Where the parts lie. All but `state` are pinned host memory with one address for both sides.

    Attributes:
        page: `moet._core.MAIL_PAGE_BYTES`, aligned to 64.
        x: [max_tokens, H] of up to 4 bytes, aligned to 16.
        ids: int32 [max_tokens, top_k].
        rows: [max_tokens * top_k, H] in the layers' row type, aligned to 16.
        state: `STATE_BYTES` zeroed bytes of device memory, aligned to 8.
    """

    page: int
    x: int
    ids: int
    rows: int
    state: int

    @property
    def failed(self) -> int:
        """Device address of the word that tells the combine that rows will not come."""
        return self.state + FAILED_AT


class CudaMail:
    """Launches the mailbox's kernels.

    Args:
        launcher: runs kernels.
        addresses: the parts.
        patience_seconds: how long the card waits without a sign of life of the CPU.
        overlap: launches may start while their predecessor runs.
    """

    def __init__(
        self,
        launcher: Launcher,
        addresses: MailAddresses,
        *,
        patience_seconds: float,
        overlap: bool,
    ) -> None:
        self.addresses = addresses
        self._launcher = launcher
        self._overlap = overlap
        a = addresses
        self._post = PostParams(page=a.page, mail_x=a.x, mail_ids=a.ids, state=a.state)
        self._wait = WaitParams(page=a.page, state=a.state, patience_ns=int(patience_seconds * 1e9))

    def post(self, step: Step, stream: int, *, index: int, table: int, experts: int, hidden: int,
             slots: int) -> None:  # fmt: skip
        """Enqueues the request of a layer.

        Args:
            step: the call.
            stream: where to.
            index: of the layer, as the CPU's end knows it.
            table: of the layer.
            experts: E.
            hidden: H.
            slots: of a token.

        Raises:
            KernelError: x or its rows are not aligned to 16 bytes.
        """
        post = self._post
        post.table, post.ids, post.x = table, step.ids, step.x
        post.tokens, post.top_k, post.experts = step.tokens, slots, experts
        post.row_bytes, post.layer = step.x_type.nbytes * hidden, index
        post.x_type = int(step.x_type)
        if (step.x | post.row_bytes) % 16:
            raise KernelError(
                f"x at {step.x:#x} with rows of {post.row_bytes} bytes is not aligned to 16",
                hint="pass a contiguous tensor of its own",
            )
        self._launcher.launch(
            "moet_post",
            post,
            grid=(step.tokens, 1),
            threads=_POST_THREADS,
            shared_bytes=0,
            stream=stream,
            overlap=self._overlap,
        )

    def wait(self, stream: int, *, early: bool, overlap: bool) -> None:
        """Enqueues the wait for the rows.

        Args:
            stream: where to.
            early: kernels lie between the post and this one.
            overlap: it may start while its predecessor runs.
        """
        self._wait.early = early
        self._launcher.launch(
            "moet_wait",
            self._wait,
            grid=(1, 1),
            threads=_WAIT_THREADS,
            shared_bytes=0,
            stream=stream,
            overlap=self._overlap and overlap,
        )
