"""NVRTC and the CUDA driver through their optional Python bindings: the only imports of `cuda`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

from moet.base.errors import KernelError, MachineError

_HINT: Final = "install moet with its GPU extra: pip install 'moet[gpu]'"


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MachineError(
            f"the Python package of {name} is missing: {error}", hint=_HINT
        ) from error


def compiler() -> Any:
    """`cuda.core`, whose Program is NVRTC.

    Raises:
        MachineError: not installed.
    """
    return _module("cuda.core")


def nvrtc_version() -> str:
    """Version of the NVRTC library that `compiler` uses.

    Raises:
        MachineError: the bindings or the library are missing.
    """
    major, minor = call(_module("cuda.bindings.nvrtc").nvrtcVersion)
    return f"{major}.{minor}"


def driver() -> Any:
    """`cuda.bindings.driver`.

    Raises:
        MachineError: not installed.
    """
    return _module("cuda.bindings.driver")


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function of the bindings; its results without the status: none, one, or a tuple.

    Raises:
        KernelError: the status is not success; names the function and the status.
        MachineError: the library behind the bindings is not on this machine.
    """
    try:
        status, *results = function(*args)
    except RuntimeError as error:  # the bindings load their libraries at the first call
        raise MachineError(
            f"{function.__name__} needs a library that cannot be loaded: {error}",
            hint=f"a GPU needs NVIDIA's display driver; {_HINT}",
        ) from error
    if int(status) != 0:
        raise KernelError(
            f"{function.__name__} failed: {status.name}",
            hint="look for a full card, an older driver, or an earlier error of another kernel",
        )
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)
