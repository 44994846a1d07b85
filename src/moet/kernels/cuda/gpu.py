"""A GPU: its facts, its kernels loaded, launches, and the little memory and timing that exams need.

Uses the primary context, which is torch's too, so addresses and streams can be mixed freely.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from moet.kernels.cuda import build, toolkit
from moet.kernels.cuda.params import Params
from moet.kernels.cuda.plan import Card

KERNELS: Final = (
    "moet_quantise",
    "moet_gate_up_8",
    "moet_gate_up_16",
    "moet_down_8",
    "moet_down_16",
    "moet_combine",
    "moet_post",
    "moet_wait",
)

CACHE_FOLDER: Final = "cuda"
"""Below the settings' cache_dir."""


class ReadParams(ctypes.Structure):
    """Arguments of the read-only kernel."""

    _fields_ = [
        ("words", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("sink", ctypes.c_uint64),
    ]


class Gpu:
    """One GPU with the kernels loaded; it is a `Launcher`.

    Args:
        ordinal: as the driver counts.
        cache: folder of compiled kernels.
        defines: macros for the device sources, for experiments.

    Raises:
        MachineError: the bindings or NVRTC are missing.
        KernelError: no such GPU, or one that the kernels do not run on.
    """

    def __init__(self, ordinal: int, cache: Path, defines: tuple[str, ...] = ()) -> None:
        self._driver = toolkit.driver()
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", ordinal)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self.make_current()
        self.card = self._read_card()
        self.driver_version = int(self._call("cuDriverGetVersion"))
        self._functions: dict[str, Any] = {}
        self._arguments: dict[str, Any] = {}
        self._load(cache, defines, build.MAIN, KERNELS)
        self._load(cache, (), build.PROBES, ("moet_read",))

    def _call(self, name: str, *args: Any) -> Any:
        return toolkit.call(getattr(self._driver, name), *args)

    def make_current(self) -> None:
        """Makes the primary context the calling thread's."""
        self._call("cuCtxSetCurrent", self._context)

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", attribute, self._device))

    def _read_card(self) -> Card:
        name = self._call("cuDeviceGetName", 128, self._device)
        return Card(
            name=bytes(name).split(b"\0")[0].decode(),
            capability=(
                self._attribute("COMPUTE_CAPABILITY_MAJOR"),
                self._attribute("COMPUTE_CAPABILITY_MINOR"),
            ),
            multiprocessors=self._attribute("MULTIPROCESSOR_COUNT"),
            shared_per_block=self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            shared_per_multiprocessor=self._attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        )

    def _load(
        self, cache: Path, defines: tuple[str, ...], main: str, names: tuple[str, ...]
    ) -> None:
        architecture = build.architecture_of(self.card.capability)
        key = build.cache_key(architecture, defines, self.driver_version, main)
        cubin = build.cached(cache, key, lambda: build.compile_kernels(architecture, defines, main))
        module = self._call("cuModuleLoadData", cubin)
        attribute = self._driver.CUfunction_attribute
        limit = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        for name in names:
            function = self._call("cuModuleGetFunction", module, name.encode())
            static = attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
            used = int(self._call("cuFuncGetAttribute", static, function))
            self._call("cuFuncSetAttribute", function, limit, self.card.shared_per_block - used)
            self._functions[name] = function

    # ---- launches

    def launch(
        self,
        kernel: str,
        params: Params | ReadParams,
        *,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        overlap: bool,
    ) -> None:
        """Enqueues a kernel; the driver copies `params` before it returns."""
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = self._driver.CUstream(stream)
        if overlap:
            config.attrs, config.numAttrs = [self._overlap_attribute()], 1
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        if isinstance(params, ReadParams):  # three arguments, not one structure
            start = ctypes.addressof(params)
            pointers = (ctypes.c_void_p * 3)(start, start + 8, start + 16)
        function = self._functions[kernel]
        self._call("cuLaunchKernelEx", config, function, ctypes.addressof(pointers), 0)

    def _overlap_attribute(self) -> Any:
        attribute = self._driver.CUlaunchAttribute()
        names = self._driver.CUlaunchAttributeID
        attribute.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        return attribute

    def read(self, address: int, nbytes: int, sink: int, stream: int) -> None:
        """Enqueues the read-only kernel over `nbytes` (a multiple of 16)."""
        params = ReadParams(address, nbytes // 16, sink)
        blocks = 2 * self.card.multiprocessors
        self.launch(
            "moet_read", params, grid=(blocks, 1), threads=512, shared_bytes=0, stream=stream,
            overlap=False,
        )  # fmt: skip

    def registers(self, kernel: str) -> int:
        """Registers of a thread, as the driver counts them."""
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        return int(self._call("cuFuncGetAttribute", attribute, self._functions[kernel]))

    # ---- memory

    def allocate(self, nbytes: int) -> int:
        """Device memory, aligned to 256 bytes; its address. `free` it."""
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        """Gives memory of `allocate` back."""
        self._call("cuMemFree", address)

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        """Sets every byte."""
        self._call("cuMemsetD8", address, byte, nbytes)
        self.synchronise()

    def upload(self, address: int, data: NDArray[Any]) -> None:
        """Copies a contiguous array to the card; returns when it is there."""
        self._call("cuMemcpyHtoD", address, data.ctypes.data, data.nbytes)
        self.synchronise()

    def upload_new(self, data: NDArray[Any]) -> int:
        """Allocates and uploads; the address."""
        address = self.allocate(data.nbytes)
        self.upload(address, data)
        return address

    def download(self, data: NDArray[Any], address: int) -> None:
        """Fills a contiguous array from the card; waits for all work enqueued before."""
        self.synchronise()
        self._call("cuMemcpyDtoH", data.ctypes.data, address, data.nbytes)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copies inside the card."""
        self._call("cuMemcpyDtoD", to, source, nbytes)
        self.synchronise()

    # ---- streams, graphs, time

    def stream(self) -> int:
        """A stream that does not wait for the default one."""
        return int(self._call("cuStreamCreate", self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def synchronise(self) -> None:
        """Waits for everything that was enqueued.

        Raises:
            KernelError: a kernel has failed.
        """
        self._call("cuCtxSynchronize")

    def capture(self, stream: int, work: Callable[[], None]) -> Graph:
        """Records what `work` enqueues on the stream as a graph."""
        handle = self._driver.CUstream(stream)
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", handle, mode)
        try:
            work()
        finally:
            graph = self._call("cuStreamEndCapture", handle)
        executable = self._call("cuGraphInstantiate", graph, 0)
        self._call("cuGraphDestroy", graph)
        return Graph(self, executable, stream)

    def milliseconds(self, stream: int, work: Callable[[], None]) -> float:
        """Device time from before the work that `work` enqueues on the stream until after it."""
        flags = self._driver.CUevent_flags.CU_EVENT_DEFAULT
        begin, end = self._call("cuEventCreate", flags), self._call("cuEventCreate", flags)
        handle = self._driver.CUstream(stream)
        self._call("cuEventRecord", begin, handle)
        work()
        self._call("cuEventRecord", end, handle)
        self._call("cuEventSynchronize", end)
        elapsed = float(self._call("cuEventElapsedTime", begin, end))
        for event in (begin, end):
            self._call("cuEventDestroy", event)
        return elapsed

    def laps(
        self,
        stream: int,
        count: int,
        prepare: Callable[[int], None],
        work: Callable[[int], None],
    ) -> list[float]:
        """Milliseconds of device time of `work(0)`, `work(1)`, ...; `prepare` of each comes before
        it, untimed. All is enqueued at once; then the host sleeps and takes no core from anybody.
        """
        flags = self._driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC
        handle = self._driver.CUstream(stream)
        events = [self._call("cuEventCreate", flags) for _ in range(2 * count)]
        for i in range(count):
            prepare(i)
            self._call("cuEventRecord", events[2 * i], handle)
            work(i)
            self._call("cuEventRecord", events[2 * i + 1], handle)
        self._call("cuEventSynchronize", events[-1])
        pairs = zip(events[::2], events[1::2], strict=True)
        times = [float(self._call("cuEventElapsedTime", *pair)) for pair in pairs]
        for event in events:
            self._call("cuEventDestroy", event)
        return times


class Graph:
    """Captured work, to be replayed."""

    def __init__(self, gpu: Gpu, executable: Any, stream: int) -> None:
        self._gpu = gpu
        self._executable = executable
        self._stream = stream

    def replay(self) -> None:
        """Enqueues the work on the stream it was captured from."""
        driver = toolkit.driver()
        toolkit.call(driver.cuGraphLaunch, self._executable, driver.CUstream(self._stream))

    def close(self) -> None:
        """Gives the graph's resources back."""
        toolkit.call(toolkit.driver().cuGraphExecDestroy, self._executable)
