"""`moet bench memory`: what serving costs in memory beyond the experts themselves.

A random checkpoint of a real model's width is served, and the same model with next to no experts:
one a layer, of 32 columns, top-1; layers, widths, attention, vocabulary and KV cache stay. Both
load, answer a long prompt, one request and several at once, while the memory of all their processes
is sampled. The first may use what the second does, less its experts, plus `ALLOWED` times the bytes
that the experts have in the checkpoint, plus `SPARE` bytes.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moet import demo
from moet.base.errors import UsageError
from moet.bench.footprint import Footprint, Sampler
from moet.bench.record import Record, Row, make_record
from moet.bench.serving import Serving
from moet.checkpoint import open_checkpoint
from moet.checkpoint.families import ARCHITECTURES
from moet.checkpoint.synth import SynthModel, cut_config, named_config
from moet.checkpoint.synth.cut import text_part

ALLOWED = 1.05
SPARE = 10**9
EXPERTS, BARE = "experts", "zero experts"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
VOCAB = 1024  # the tokenizer's
BARE_WIDTH = 32  # one block: the least that an expert can have

Progress = Callable[[str, float], None]
"""Told what is being done and the share done, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to serve and what to ask.

    Attributes:
        config: a preset of `moet synth`, or a config.json.
        layers: how many to keep; None: all.
        experts: experts a layer to keep; None: all.
        folder: where the checkpoints are written, one after the other; None: the temporary one.
        kv_bytes: the KV cache, the same for both.
        prompt: tokens of the longest prompt.
        answer: tokens of every answer.
        together: requests at once.
        seed: of the weights.
    """

    config: str = "qwen3-30b-a3b"
    layers: int | None = 20
    experts: int | None = None
    folder: Path | None = None
    kv_bytes: int = 1 << 30
    prompt: int = 512
    answer: int = 16
    together: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.kv_bytes, self.prompt, self.answer, self.together) < 1:
            hint = "moet bench memory --prompt 512 --answer 16 --together 4"
            raise UsageError("sizes of requests and cache are 1 or more", hint=hint)

    @property
    def context(self) -> int:
        """Tokens of the longest request."""
        return self.prompt + self.answer


def bare(config: dict[str, Any]) -> dict[str, Any]:
    """The model with as little of experts as it can have: one a layer, one block wide."""
    arch = ARCHITECTURES[config["model_type"]]
    ours = {arch.experts: 1, arch.top_k: 1, arch.intermediate: BARE_WIDTH}
    text = {**text_part(config), **ours}
    return {**config, "text_config": text} if arch.nested and "text_config" in config else text


def configs(options: Options) -> dict[str, dict[str, Any]]:
    """The two models by name.

    Raises:
        BrokenCheckpoint: no such preset, or a config that cannot be used.
        UsageError: a count that the model cannot have.
    """
    whole = cut_config(
        named_config(options.config), layers=options.layers, experts=options.experts, vocab=VOCAB
    )
    return {BARE: bare(whole), EXPERTS: whole}


def write(config: dict[str, Any], folder: Path, options: Options, progress: Progress) -> int:
    """Writes a random checkpoint with the demo's tokenizer; returns the bytes of its experts."""
    model = SynthModel(config, seed=options.seed)
    model.write(folder, progress=lambda done, of: progress("writing the checkpoint", done / of))
    for name in TOKENIZER:
        shutil.copy(demo.path() / name, folder / name)
    return open_checkpoint(folder).expert_bytes


def ask(server: Serving, options: Options) -> None:
    """A long prompt, then one short request, then several at once; tokens differ in all."""
    sizes = [options.prompt, 1, *[max(1, options.prompt // 8)] * options.together]
    prompts = [[(7 * i + 11 * n) % VOCAB for i in range(size)] for n, size in enumerate(sizes)]
    for prompt in prompts[:2]:
        server.complete(prompt, options.answer)
    with ThreadPoolExecutor(options.together) as pool:
        list(pool.map(lambda prompt: server.complete(prompt, options.answer), prompts[2:]))


def _figures(stage: str, peak: Footprint) -> Row:
    parts = {"total": peak.total, "private": peak.private, "shared": peak.shared}
    return {f"{stage}_{k}_bytes": v for k, v in {**parts, "file": peak.file}.items()}


def serve(
    folder: Path, options: Options, progress: Progress, command: tuple[str, ...] | None = None
) -> Row:
    """Serves a checkpoint and samples it from its first moment to the end of the requests.

    Raises:
        EngineError: it does not start, or does not answer.
        MachineError: its memory cannot be seen.
    """
    words = ["--kv-cache-memory-bytes", str(options.kv_bytes), "--max-model-len"]
    with (
        Serving(folder, [*words, str(options.context)], command) as server,
        Sampler(server.pid) as sampler,
    ):
        progress("loading", 0.0)
        seconds = server.wait()
        sampler.look()
        loading = sampler.take()
        progress("answering", 0.0)
        ask(server, options)
        sampler.look()
        answering = sampler.take()
        return {
            "peak_bytes": max(loading.total, answering.total),
            **_figures("loading", loading),
            **_figures("answering", answering),
            "own_peaks_bytes": sampler.last.highest,
            "ready_s": seconds,
            "looks": sampler.looks,
        }


def limit(bare_row: Row, row: Row) -> Row:
    """What the model with experts may use, and whether it kept to it.

    `own_peaks_hold`: the same of the sums of the processes' own peaks, which no sampling misses.
    """

    def allowed(key: str) -> float:
        engine = bare_row[key] - bare_row["expert_bytes"]
        return float(engine + ALLOWED * row["expert_bytes"] + SPARE)

    return {
        "kind": "limit",
        "limit_bytes": int(allowed("peak_bytes")),
        "peak_bytes": row["peak_bytes"],
        "beyond_experts_bytes": row["peak_bytes"]
        - (bare_row["peak_bytes"] - bare_row["expert_bytes"])
        - row["expert_bytes"],
        "holds": row["peak_bytes"] <= allowed("peak_bytes"),
        "own_peaks_hold": row["own_peaks_bytes"] <= allowed("own_peaks_bytes"),
    }


def run(
    options: Options,
    progress: Progress = lambda what, share: None,
    command: tuple[str, ...] | None = None,
) -> Record:
    """Measures. Takes minutes, and disk for the checkpoint as long as it runs.

    Raises:
        BrokenCheckpoint, UsageError: as `configs`; no space.
        EngineError, MachineError: as `serve`.
    """
    rows: list[Row] = []
    for name, config in configs(options).items():
        with tempfile.TemporaryDirectory(prefix="moet-bench-", dir=options.folder) as place:
            folder = Path(place, "model")
            expert_bytes = write(config, folder, options, progress)
            row = serve(folder, options, progress, command)
        rows.append({"kind": "run", "who": name, "expert_bytes": expert_bytes, **row})
    setup = asdict(options) | {"folder": None, "allowed": ALLOWED, "spare_bytes": SPARE}
    return make_record("serve-memory", setup, [*rows, limit(*rows)])
