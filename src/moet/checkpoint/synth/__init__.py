"""Random-weight checkpoints of real geometries, in the real file layout, at disk speed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moet.checkpoint.geometry import read_geometry
from moet.checkpoint.synth.cut import cut_config, named_config, published_format
from moet.checkpoint.synth.model import COMPLETE, SynthModel
from moet.checkpoint.synth.presets import PRESETS
from moet.checkpoint.synth.words import write_tokenizer
from moet.checkpoint.writer import SHARD_BYTES

__all__ = [
    "COMPLETE",
    "PRESETS",
    "SynthModel",
    "cut_config",
    "model",
    "named_config",
    "preset_bytes",
    "published_format",
    "write",
    "write_tokenizer",
]


def model(
    config: str,
    *,
    layers: int | None = None,
    experts: int | None = None,
    vocab: int | None = None,
    zipf: float = 0.0,
    seed: int = 0,
) -> SynthModel:
    """A random-weight model.

    Args:
        config: name of a preset, or path of a config.json.
        layers: how many to keep; None: all.
        experts: routed experts a layer to keep; None: all.
        vocab: words to keep; None: all. (The embeddings of a big vocabulary are gigabytes.)
        zipf: exponent of the law that routers follow.
        seed: what is drawn.

    Raises:
        BrokenCheckpoint: UNKNOWN_PRESET, or what is wrong with the config.
        UsageError: a count that the model cannot have.
    """
    cut = cut_config(named_config(config), layers=layers, experts=experts, vocab=vocab)
    return SynthModel(cut, seed=seed, zipf=zipf)


def preset_bytes(name: str) -> int:
    """Bytes of all tensors of a whole preset, from two small cuts of it.

    With every expert a layer they grow by the same; planning all experts takes seconds.
    """
    geometry = read_geometry(named_config(name), Path(name))
    few = geometry.top_k
    base, more = (model(name, experts=count).nbytes for count in (few, few + 1))
    return base + (geometry.experts - few) * (more - base)


def write(
    config: str,
    folder: Path,
    *,
    layers: int | None = None,
    experts: int | None = None,
    vocab: int | None = None,
    zipf: float = 0.0,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> SynthModel:
    """Writes a random-weight checkpoint; arguments as ``model``, and those of ``SynthModel.write``.

    Raises:
        BrokenCheckpoint: as ``model``; NOT_EMPTY, NO_SPACE or UNREADABLE for the folder.
        UsageError: as ``model``.
    """
    made = model(config, layers=layers, experts=experts, vocab=vocab, zipf=zipf, seed=seed)
    made.write(folder, shard_bytes=shard_bytes, progress=progress)
    return made
