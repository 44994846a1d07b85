"""One GPU with all that the experts need of it, opened and closed in one piece."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moet.kernels.cuda.gpu import CACHE_FOLDER, Gpu
from moet.kernels.cuda.link import Link
from moet.kernels.cuda.memory import CudaMemory


@dataclass(frozen=True, kw_only=True)
class OpenedCard:
    """A GPU in use.

    Attributes:
        gpu: its kernels and memory.
        link: its host link.
        memory: for uploads.
    """

    gpu: Gpu
    link: Link
    memory: CudaMemory


@contextmanager
def opened_card(cache_dir: Path, ordinal: int = 0) -> Iterator[OpenedCard]:
    """Opens a GPU; kernels are compiled, or found below the cache directory.

    Args:
        cache_dir: as in the settings.
        ordinal: as the driver counts.

    Raises:
        MachineError: the bindings or the driver are missing.
        KernelError: no such GPU, or one that the kernels do not run on.
    """
    gpu = Gpu(ordinal, cache_dir.expanduser() / CACHE_FOLDER)
    memory = CudaMemory(ordinal)
    try:
        yield OpenedCard(gpu=gpu, link=Link(gpu), memory=memory)
    finally:
        memory.close()
