"""A card's memory for the card tier, and the one stream that copies there (tiers/memory.py).

Any thread may call. Around each call the primary context (torch's too) is pushed and popped, so the
thread keeps its own, and the thread's capture mode is set to *relaxed*: in any other mode the
driver refuses calls that it holds to be unsafe while some thread captures in mode "global", vLLM's
and torch's, and spoils that capture too. ``paused`` keeps our calls out of a capture altogether,
and is what a capture is put in; the mode is for captures that nobody tells us about.

| call | without the mode, during a global capture of another thread (driver 580) |
|---|---|
| ``allocate``, ``free``, ``pin``, ``unpin`` | refused, capture spoilt |
| ``register``, ``unregister`` | refused, capture spoilt |
| ``wait`` | refused, capture spoilt |
| ``copy_in``, ``copy_out``, ``record``, ``hold_copies``, ``drop``, ``room`` | done, capture whole |

So memory is taken and given back only when a tier is made and closed. No call may be made in the
capturing thread itself, where the mode would put what we enqueue beside the graph instead of in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from moet.base.errors import CopyError, KernelError
from moet.base.pause import Pause
from moet.kernels.cuda import toolkit


class CudaMemory:
    """Memory of one GPU.

    Args:
        ordinal: as the driver counts.

    Raises:
        MachineError: the bindings or the driver are missing.
        KernelError: no such GPU.
    """

    def __init__(self, ordinal: int) -> None:
        self._driver = toolkit.driver()
        self._pause = Pause()
        toolkit.call(self._driver.cuInit, 0)
        self._device = toolkit.call(self._driver.cuDeviceGet, ordinal)
        self._context = toolkit.call(self._driver.cuDevicePrimaryCtxRetain, self._device)
        # Non-blocking: it neither waits for the default stream nor makes that one wait.
        self._stream = self._driver.CUstream(
            self._one("cuStreamCreate", self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        )

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """A call: not during a pause, in our context, harmless to captures elsewhere."""
        driver = self._driver
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        with self._pause.call(KernelError):
            toolkit.call(driver.cuCtxPushCurrent, self._context)
            before = toolkit.call(driver.cuThreadExchangeStreamCaptureMode, relaxed)
            try:
                yield
            finally:
                toolkit.call(driver.cuThreadExchangeStreamCaptureMode, before)
                toolkit.call(driver.cuCtxPopCurrent)

    def _call(self, name: str, *args: Any) -> Any:
        return toolkit.call(getattr(self._driver, name), *args)

    def _one(self, name: str, *args: Any) -> int:
        """One call that gives a handle or an address."""
        with self._entered():
            return int(self._call(name, *args))

    def _do(self, name: str, *args: Any) -> None:
        """One call that gives nothing."""
        with self._entered():
            self._call(name, *args)

    def paused(self) -> AbstractContextManager[None]:
        """Inside, no method is at work; calls of other threads wait, those of this one are errors.

        Copies that were started before go on: the card does them without a call.
        """
        return self._pause.held()

    # ---- memory

    def room(self) -> tuple[int, int]:
        """Free and total bytes of the card."""
        with self._entered():
            free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def allocate(self, nbytes: int) -> int:
        """Memory of the card, aligned to 256 bytes or more; its address."""
        return self._one("cuMemAlloc", nbytes)

    def free(self, address: int) -> None:
        """Gives memory of ``allocate`` back; waits for the work that is under way."""
        self._do("cuMemFree", address)

    def pin(self, nbytes: int) -> int:
        """Page-locked host memory; its address, page-aligned."""
        return self._one("cuMemHostAlloc", nbytes, self._driver.CU_MEMHOSTALLOC_PORTABLE)

    def unpin(self, address: int) -> None:
        """Gives memory of ``pin`` back."""
        self._do("cuMemFreeHost", address)

    def register(self, address: int, nbytes: int) -> None:
        """Page-locks host memory that is there already."""
        self._do("cuMemHostRegister", address, nbytes, self._driver.CU_MEMHOSTREGISTER_PORTABLE)

    def unregister(self, address: int) -> None:
        """Ends ``register``."""
        self._do("cuMemHostUnregister", address)

    # ---- copies

    def copy_in(self, to: int, source: int, nbytes: int) -> int:
        """Starts a copy from page-locked host memory; the event behind it.

        Raises:
            CopyError: it may be under way all the same. After any other error it is not.
        """
        with self._entered():
            event = self._new_event()
            try:
                self._call("cuMemcpyHtoDAsync", to, source, nbytes, self._stream)
                self._behind_copy(event)
            except BaseException:
                self._call("cuEventDestroy", event)
                raise
        return int(event)

    def _behind_copy(self, event: Any) -> None:
        """Records the event of a copy. Where that fails the copy is waited for, so that nothing is
        under way that nobody can wait for."""
        try:
            self._call("cuEventRecord", event, self._stream)
        except KernelError as error:
            try:
                self._call("cuStreamSynchronize", self._stream)
            except KernelError as worse:
                raise CopyError(f"{error}; {worse}", hint=worse.hint) from error
            raise

    def copy_out(self, to: int, source: int, nbytes: int) -> None:
        """Copies to any host memory, behind what the copy stream has, and waits for it."""
        with self._entered():
            event = self._new_event()
            try:
                self._call("cuMemcpyDtoHAsync", to, source, nbytes, self._stream)
                self._call("cuEventRecord", event, self._stream)
                self._call("cuEventSynchronize", event)
            finally:
                self._call("cuEventDestroy", event)

    # ---- events

    def _new_event(self) -> Any:
        """An event that a waiting thread sleeps for: the cores belong to the experts."""
        flags = self._driver.CUevent_flags
        sleeping = flags.CU_EVENT_BLOCKING_SYNC | flags.CU_EVENT_DISABLE_TIMING
        return self._call("cuEventCreate", sleeping)

    def record(self, stream: int) -> int:
        """The point that a stream has reached with what it has now."""
        with self._entered():
            event = self._new_event()
            self._call("cuEventRecord", event, self._driver.CUstream(stream))
        return int(event)

    def hold_copies(self, event: int) -> None:
        """Copies that are started from now on begin after the event."""
        self._do("cuStreamWaitEvent", self._stream, self._driver.CUevent(event), 0)

    def wait(self, event: int) -> None:
        """Sleeps until the card has passed the event; a pause waits as long."""
        self._do("cuEventSynchronize", self._driver.CUevent(event))

    def drop(self, event: int) -> None:
        """Forgets an event."""
        self._do("cuEventDestroy", self._driver.CUevent(event))

    def close(self) -> None:
        """Gives the copy stream and the context back, when no tier uses them any more."""
        with self._pause.call(KernelError):
            toolkit.call(self._driver.cuStreamDestroy, self._stream)
            toolkit.call(self._driver.cuDevicePrimaryCtxRelease, self._device)
