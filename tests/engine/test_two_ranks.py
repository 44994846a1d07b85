"""Tensor parallelism over two CPU processes: each holds and computes its slice of every expert."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moet.checkpoint import open_checkpoint
from moet.engine.heartbeat import Page
from moet.machine import usable_cpus

from .conftest import drive

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,  # five processes that import torch
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]


def test_two_ranks_compute_one_model(engine_root: Path) -> None:
    page = Page.create(engine_root / "ranks")
    model = {"model": str(engine_root / "qwen3_moe"), "load_format": "moet"}
    apart = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"{usable_cpus()[0]}|{usable_cpus()[-1]}",
        "MOET_HEARTBEAT": str(page.path),
    }
    jobs = [
        {"name": "one", **model},
        {"name": "two", **model, "env": apart, "engine": {"tensor_parallel_size": 2}},
    ]
    runs = drive(engine_root, jobs)
    one, two = (np.concatenate(runs[name]["prompt_logprobs"]) for name in ("one", "two"))
    assert np.abs(one - two).mean() < 0.03
    assert np.abs(one - two).max() < 0.2

    total = open_checkpoint(engine_root / "qwen3_moe").expert_bytes
    ranks = page.ranks()
    assert len({rank.pid for rank in ranks}) == 2
    assert all(0 < rank.loaded[0] == rank.loaded[1] < total for rank in ranks)
    assert min(rank.beats for rank in ranks) > 2 * 2 * 12
