"""``--load-format moet``: vLLM's loader for everything but routed experts, moet's for those.

In this order, all inside the engine's ``load_model`` and so before it measures memory:
refuse what is not covered; build the model with moet's layers in place of the stock ones; give the
engine every tensor but the experts'; read the experts into moet's arena; bind each layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from moet.base.errors import CheckpointError, UnsupportedError
from moet.checkpoint import Checkpoint, open_checkpoint
from moet.engine import adapter, experts, op, refuse, settings, versions
from moet.engine.tell import telling

_Base: Any = versions.hook("vllm.model_executor.model_loader:DefaultModelLoader")


class MoetModelLoader(_Base):  # type: ignore[misc]
    """The loader behind the load format ``moet``. One instance loads one model."""

    counter_before_loading_weights: float

    def __init__(self, load_config: Any) -> None:
        stock = copy.copy(load_config)
        stock.load_format = "safetensors"
        super().__init__(stock)
        self.enable_weights_track = True  # vLLM leaves it off where a checkpoint is quantised
        self._checkpoint: Checkpoint | None = None
        self._config: Any = None

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Builds and fills the model.

        Raises:
            UnsupportedError: see ``refuse``.
            CheckpointError: the files are not a checkpoint that moet reads.
            EngineError: the engine built something else than the checkpoint says.
        """
        with telling():
            versions.check()
            settings.read(vllm_config.additional_config)
            refuse.engine_config(vllm_config)
            self._config = vllm_config
            self._checkpoint = self._open(model_config)
            return super().load_model(vllm_config, model_config, prefix)

    def _open(self, model_config: Any) -> Checkpoint:
        folder, *_ = self._prepare_weights(
            model_config.model, None, model_config.revision, False, None
        )
        return open_checkpoint(Path(folder))

    @property
    def checkpoint(self) -> Checkpoint:
        """What ``load_model`` has opened.

        Raises:
            UnsupportedError: the engine wants to fill a model that another loader built.
        """
        if self._checkpoint is None:
            hint = "start the server again instead"
            raise UnsupportedError("moet does not serve weights reloaded in place", hint=hint)
        return self._checkpoint

    def create_model(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's model with moet's layers in it; stock classes are back in place after."""
        with versions.routed_experts_replaced(experts.moet_class):
            return super().create_model(*args, **kwargs)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """The engine's tensors through the engine, the experts through moet."""
        checkpoint = self.checkpoint
        for _, parameter in _sizeable(model):
            parameter.data.fill_(torch.nan)  # what the checkpoint leaves out stays so
        super().load_weights(model, model_config)
        adapter.load_and_bind(model, checkpoint, self._config, op.next_model())

    def track_weights_loading(self, model: Any, loaded_weights: Any, **options: Any) -> None:
        """Every tensor of the engine must have come from the checkpoint, and whole.

        vLLM counts a fused tensor (q, k and v in one) as loaded when one of its parts was.

        Raises:
            CheckpointError: some did not; names them.
        """
        try:
            super().track_weights_loading(model, loaded_weights, **options)
        except ValueError as error:
            raise _incomplete(str(error)) from error
        holes = [name for name, parameter in _sizeable(model) if parameter.isnan().any()]
        if holes:
            raise _incomplete(f"parts of {', '.join(holes)} are missing, or NaN")

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, Any]]:
        """(name, tensor) of every tensor of a source that is not a routed expert's.

        The others are never asked for: their bytes are not read here.
        """
        from safetensors import safe_open

        is_expert = self.checkpoint.is_routed_expert
        self.counter_before_loading_weights = self.counter_before_loading_weights or perf_counter()
        _, files, *_ = self._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            False,
            source.allow_patterns_overrides,
        )
        for file in sorted(files):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    if not is_expert(name):
                        yield source.prefix + name, tensors.get_tensor(name)


def _sizeable(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, parameter) of a model's arrays in BF16, FP16 or FP32; scalars have defaults."""
    for name, parameter in model.named_parameters():
        if parameter.dtype in op.DTYPES and parameter.numel() > 1:
            yield name, parameter


def _incomplete(what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint lacks tensors that the model needs: {what}",
        hint="download the checkpoint again, all of its shards",
    )
