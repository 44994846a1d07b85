"""The entry point of the vLLM plugin (group ``vllm.general_plugins``).

vLLM calls ``register`` once in every process: API server, engine core, workers. All it does is to
add the load format ``moet``. Nothing of vLLM changes for a model that is loaded in another format;
what moet replaces, it replaces while such a model is built (loader.py).
"""

from __future__ import annotations


def register() -> None:
    """Adds ``--load-format moet`` to this process's vLLM; may be called any number of times.

    Raises:
        EngineError: this vLLM lacks a hook that moet needs; names it.
    """
    from moet.engine import versions

    if versions.loader_is_registered():
        return
    from moet.engine.loader import MoetModelLoader

    versions.register_loader(MoetModelLoader)
    versions.adopt_log()
