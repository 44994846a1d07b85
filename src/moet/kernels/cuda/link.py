"""What ties a stream of the card to the host: pinned memory, events, waits, host functions.

Everything works on the primary context (see `gpu.Gpu`) and may be called from any thread.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from moet.base.errors import KernelError
from moet.kernels.cuda import toolkit
from moet.kernels.cuda.gpu import Gpu


@functools.cache
def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class Link:
    """The host link of a GPU.

    Args:
        gpu: the card; its primary context is used.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._driver = toolkit.driver()

    def _call(self, name: str, *args: Any) -> Any:
        self._gpu.make_current()
        return toolkit.call(getattr(self._driver, name), *args)

    def pinned(self, nbytes: int) -> int:
        """Page-locked host memory that the card reads and writes at the same address.

        Raises:
            KernelError: the limit of locked memory (`ulimit -l`), or no memory.
        """
        flags = self._driver.CU_MEMHOSTALLOC_PORTABLE | self._driver.CU_MEMHOSTALLOC_DEVICEMAP
        return int(self._call("cuMemHostAlloc", nbytes, flags))

    def free_pinned(self, address: int) -> None:
        """Gives memory of `pinned` back."""
        self._call("cuMemFreeHost", address)

    def upload_async(self, address: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueues a copy from pinned host memory to the card."""
        self._call("cuMemcpyHtoDAsync", address, source, nbytes, self._driver.CUstream(stream))

    def capturing(self, stream: int) -> bool:
        """Whether a graph is being captured from the stream."""
        status = self._call("cuStreamIsCapturing", self._driver.CUstream(stream))
        none = self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        return bool(status != none)

    def event(self) -> Any:
        """An event without timing."""
        flags = self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        return self._call("cuEventCreate", flags)

    def free_event(self, event: Any) -> None:
        """Gives an event back."""
        self._call("cuEventDestroy", event)

    def follow(self, stream: int, leader: int, event: Any) -> None:
        """What is enqueued on `stream` from now on waits for what is on `leader` by now."""
        self._call("cuEventRecord", event, self._driver.CUstream(leader))
        self._call("cuStreamWaitEvent", self._driver.CUstream(stream), event, 0)

    def wait_for_word(self, stream: int, address: int, value: int) -> None:
        """Enqueues a wait of the stream itself until the 32-bit word there has the value.

        Raises:
            KernelError: this driver or device has no memory operations of streams.
        """
        equal = self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        self._call("cuStreamWaitValue32", self._driver.CUstream(stream), address, value, equal)

    def host_function(self, stream: int, function: int, data: int) -> None:
        """Enqueues a call of the C function `void f(void* data)` on a thread of the driver.

        Past the Python bindings: they would wrap the function in one that takes Python's lock, and
        that frees its argument after the first call, which a replayed graph repeats.

        Args:
            stream: where to.
            function: its address.
            data: its argument.

        Raises:
            KernelError: the driver refuses.
        """
        self._gpu.make_current()
        pointers = [ctypes.c_void_p(p) for p in (stream, function, data)]
        status = _libcuda().cuLaunchHostFunc(*pointers)
        if status != 0:
            raise KernelError(f"cuLaunchHostFunc failed: status {status}")
