"""The same MoE layer in other people's kernels: kt-kernel, and ggml out of llama-cpp-python.

Each is given the same shape and calls as moet, with random weights in its own layout, and its
output is compared with fp32 on the dequantised weights. They run in a process of their own
(`peers`): their thread pools and runtimes do not belong in ours.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from moet.base.errors import KernelError
from moet.bench.rig import SCALES, Shape, Work
from moet.formats.mxfp4 import dequantise, unpack_codes
from moet.kernels.rounding import widen_bf16

MATRICES: Final = ("gate", "up", "down")


@dataclass(frozen=True)
class Weights:
    """Random experts in the checkpoint's order.

    Attributes:
        codes: matrix name -> uint8 [E, N, K/2], low nibble = even k.
        scales: matrix name -> uint8 [E, N, K/32].
    """

    codes: dict[str, NDArray[np.uint8]]
    scales: dict[str, NDArray[np.uint8]]

    @classmethod
    def random(cls, shape: Shape, seed: int) -> Weights:
        """Experts that are rotations of one: speed sees no difference, and they are made fast."""
        rng = np.random.default_rng(seed)
        codes, scales = {}, {}
        for name in MATRICES:
            rows, k = shape.intermediate, shape.hidden
            if name == "down":
                rows, k = k, rows
            codes[name] = np.empty((shape.experts, rows, k // 2), np.uint8)
            scales[name] = np.empty((shape.experts, rows, k // 32), np.uint8)
            one = rng.integers(0, 256, codes[name].shape[1:], np.uint8)
            scale = rng.integers(*SCALES, scales[name].shape[1:], np.uint8)
            for e in range(shape.experts):
                codes[name][e] = np.roll(one, e, axis=0)
                scales[name][e] = np.roll(scale, 3 * e, axis=0)
        return cls(codes, scales)

    def layer(self, x: NDArray[np.float32], work: Work) -> NDArray[np.float32]:
        """The layer's output in fp32 on the dequantised weights (SiLU, no limit): [T, H]."""
        out = np.zeros_like(x)
        for token, slot in np.ndindex(work.ids.shape):
            e = int(work.ids[token, slot])
            gate, up, down = (dequantise(self.codes[n][e], self.scales[n][e]) for n in MATRICES)
            g, u = gate @ x[token], up @ x[token]
            out[token] += work.weights[token, slot] * (down @ (g / (1 + np.exp(-g)) * u))
        return out


class Engine(Protocol):
    """A peer with a layer loaded."""

    version: str

    def step(self, x: NDArray[np.uint16], work: Work) -> Callable[[], object]:
        """The call on bf16 activations [T, H], ready to be timed."""
        ...

    def output(self) -> NDArray[np.float32]:
        """What the last call returned: fp32 [T, H]."""
        ...


class KtKernel:
    """ktransformers' kernels, from the package ``kt-kernel``."""

    CLASSES: Final = ("AMXFP4_KGroup_MOE", "AVX2MXFP4_MOE")

    def __init__(self, shape: Shape, weights: Weights, threads: int, max_tokens: int) -> None:
        package = import_module("kt_kernel")
        ext = package.kt_kernel_ext
        moe_class = next((c for name in self.CLASSES if (c := getattr(ext.moe, name, None))), None)
        if moe_class is None:
            raise KernelError("this kt-kernel has no MXFP4 kernel for this processor")
        self.version = f"{metadata.version('kt-kernel')} {package.__cpu_variant__}"
        self._shape = shape
        workers = ext.WorkerPoolConfig()
        workers.subpool_count, workers.subpool_numa_map = 1, [0]
        workers.subpool_thread_count = [threads]
        self._infer = ext.CPUInfer(workers)
        config = ext.moe.MOEConfig(shape.experts, shape.top_k, shape.hidden, shape.intermediate, 0)
        config.max_len, config.pool = max_tokens, self._infer.backend_
        quant = config.quant_config
        quant.bits, quant.group_size, quant.zero_point = 4, 32, False
        keep = []
        for name in MATRICES:
            scale = weights.scales[name].astype(np.uint16) << 7  # E8M0 as bf16
            keep.append(scale)
            setattr(config, f"{name}_projs", [[int(m.ctypes.data) for m in weights.codes[name]]])
            setattr(config, f"{name}_scales", [[int(m.ctypes.data) for m in scale]])
        self._moe = moe_class(config)
        order = np.arange(shape.experts)
        self._run(self._moe.load_weights_task(order.ctypes.data))

    def _run(self, task: Any) -> None:
        self._infer.submit(task)
        self._infer.sync()

    def step(self, x: NDArray[np.uint16], work: Work) -> Callable[[], object]:
        """One forward pass; ids are int64 there, input and output bf16."""
        ids, count = work.ids.astype(np.int64), np.array([len(x)], np.int32)
        self._out = np.zeros_like(x)
        out = self._out

        def call() -> None:
            self._run(
                self._moe.forward_task(
                    count.ctypes.data,
                    self._shape.top_k,
                    ids.ctypes.data,
                    work.weights.ctypes.data,
                    x.ctypes.data,
                    out.ctypes.data,
                    False,
                )
            )

        return call

    def output(self) -> NDArray[np.float32]:
        """The last output, widened."""
        return widen_bf16(self._out)


class _InitParams(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _PoolParams(ctypes.Structure):
    _fields_ = (
        ("cpumask", ctypes.c_bool * 512),
        ("threads", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


class _Plan(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("threads", ctypes.c_int),
        ("pool", ctypes.c_void_p),
        ("abort", ctypes.c_void_p),
        ("abort_data", ctypes.c_void_p),
        ("use_reference", ctypes.c_bool),
    )


class _Library:
    """The functions of libggml that are needed, with their types. Handles are addresses."""

    POINTERS: Final = (
        "ggml_init",
        "ggml_new_tensor_2d",
        "ggml_new_tensor_3d",
        "ggml_view_2d",
        "ggml_mul_mat_id",
        "ggml_swiglu_split",
        "ggml_mul",
        "ggml_add",
        "ggml_new_graph",
        "ggml_get_data",
        "ggml_threadpool_new",
    )

    def __init__(self, folder: Path) -> None:
        mode = ctypes.RTLD_GLOBAL
        self._libraries = [
            ctypes.CDLL(str(folder / f"lib{name}.so"), mode=mode)
            for name in ("ggml-base", "ggml-cpu")
        ]
        for name in self.POINTERS:
            self[name].restype = ctypes.c_void_p
        self["ggml_threadpool_params_default"].restype = _PoolParams
        self["ggml_graph_plan"].restype = _Plan
        self["ggml_row_size"].restype = ctypes.c_size_t
        self["ggml_version"].restype = ctypes.c_char_p

    def __getitem__(self, name: str) -> Any:
        for library in self._libraries:
            if hasattr(library, name):
                return getattr(library, name)
        raise KernelError(f"this libggml has no {name}", hint="a newer llama-cpp-python has it")

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a function; whole numbers go as 64-bit ones (sizes, addresses, and smaller)."""
        wide = [ctypes.c_int64(a) if isinstance(a, int) else a for a in arguments]
        return self[name](*wide)


class Ggml:
    """ggml's CPU backend, from the libraries of the package ``llama-cpp-python``."""

    F32, I32, MXFP4 = 0, 26, 39

    def __init__(self, shape: Shape, weights: Weights, threads: int, max_tokens: int) -> None:
        del max_tokens
        spec = find_spec("llama_cpp")
        if spec is None or not spec.submodule_search_locations:
            raise KernelError("llama_cpp is not installed")
        self._lib = _Library(Path(next(iter(spec.submodule_search_locations))) / "lib")
        self.version = self._lib.call("ggml_version").decode()
        self._shape = shape
        self._threads = threads
        hidden, intermediate = shape.hidden, shape.intermediate
        size = sum(c.size + s.size for c, s in zip(weights.codes.values(), weights.scales.values(),
                                                   strict=True))  # fmt: skip
        self._context = self._new_context(size + (1 << 20))
        self._tensors = {}
        for name in MATRICES:
            k, rows = (intermediate, hidden) if name == "down" else (hidden, intermediate)
            self._tensors[name] = self._tensor(self._context, self.MXFP4, k, rows, shape.experts)
            self._fill(self._tensors[name], _ggml_blocks(weights.codes[name], weights.scales[name]))
        parameters = self._lib["ggml_threadpool_params_default"](threads)
        self._pool = self._lib["ggml_threadpool_new"](ctypes.byref(parameters))
        self._graphs: dict[int, _Graph] = {}

    def _new_context(self, size: int) -> int:
        context: int = self._lib["ggml_init"](_InitParams(size, None, False))
        return context

    def _tensor(self, context: int, kind: int, *sizes: int) -> int:
        tensor: int = self._lib.call(f"ggml_new_tensor_{len(sizes)}d", context, kind, *sizes)
        return tensor

    def _fill(self, tensor: int, data: NDArray[Any]) -> None:
        ctypes.memmove(self._lib.call("ggml_get_data", tensor), data.ctypes.data, data.nbytes)

    def step(self, x: NDArray[np.uint16], work: Work) -> Callable[[], object]:
        """One graph: three mul_mat_id, swiglu, weights, the sum over slots."""
        tokens = len(x)
        if tokens not in self._graphs:
            self._graphs[tokens] = self._graph(tokens)
        graph = self._graphs[tokens]
        self._fill(graph.x, widen_bf16(x))
        self._fill(graph.ids, work.ids)
        self._fill(graph.weights, work.weights)
        self._last = graph
        compute = self._lib["ggml_graph_compute"]

        def call() -> None:
            compute(ctypes.c_void_p(graph.graph), ctypes.byref(graph.plan))

        return call

    def output(self) -> NDArray[np.float32]:
        """The last output."""
        tokens, hidden = self._last.tokens, self._shape.hidden
        address = self._lib.call("ggml_get_data", self._last.out)
        out = np.empty((tokens, hidden), np.float32)
        ctypes.memmove(out.ctypes.data, address, out.nbytes)
        return out

    def _graph(self, tokens: int) -> _Graph:
        call, shape = self._lib.call, self._shape
        hidden, slots = shape.hidden, shape.top_k
        width = 8 * shape.intermediate + 4 * hidden  # fp32 numbers a routing, generously
        context = self._new_context(tokens * slots * width * 4 + (16 << 20))
        x = self._tensor(context, self.F32, hidden, 1, tokens)
        ids = self._tensor(context, self.I32, slots, tokens)
        weights = self._tensor(context, self.F32, 1, slots, tokens)
        gate, up = (
            call("ggml_mul_mat_id", context, self._tensors[n], x, ids) for n in ("gate", "up")
        )
        h = call("ggml_swiglu_split", context, gate, up)
        rows = call("ggml_mul_mat_id", context, self._tensors["down"], h, ids)
        rows = call("ggml_mul", context, rows, weights)
        view = [
            call("ggml_view_2d", context, rows, hidden, tokens, 4 * hidden * slots, 4 * hidden * s)
            for s in range(slots)
        ]
        out = view[0]
        for other in view[1:]:
            out = call("ggml_add", context, out, other)
        graph = call("ggml_new_graph", context)
        self._lib["ggml_build_forward_expand"](ctypes.c_void_p(graph), ctypes.c_void_p(out))
        plan = self._lib["ggml_graph_plan"](
            ctypes.c_void_p(graph), self._threads, ctypes.c_void_p(self._pool)
        )
        scratch = np.zeros(max(plan.size, 1), np.uint8)
        plan.data = scratch.ctypes.data
        return _Graph(tokens, x, ids, weights, out, graph, plan, scratch)


@dataclass(frozen=True)
class _Graph:
    tokens: int
    x: int
    ids: int
    weights: int
    out: int
    graph: int
    plan: _Plan
    scratch: NDArray[np.uint8]


def _ggml_blocks(codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """ggml's MXFP4 blocks: the scale byte, then 16 bytes of elements i (low) and i + 16 (high)."""
    experts, rows, blocks = scales.shape
    out = np.empty((experts, rows, blocks, 17), np.uint8)
    out[..., 0] = scales
    for e in range(experts):
        nibbles = unpack_codes(codes[e]).reshape(rows, blocks, 2, 16)
        out[e, ..., 1:] = nibbles[:, :, 0] | nibbles[:, :, 1] << 4
    return out


ENGINES: Final[dict[str, tuple[str, Callable[[Shape, Weights, int, int], Engine]]]] = {
    "kt-kernel": ("kt_kernel", KtKernel),
    "ggml": ("llama_cpp", Ggml),
}
"""Name -> (module that must be importable, engine)."""
