"""Real engines for the tests of this room: all of them run once, in one process beside pytest."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.kernels.cuda_host.emulator import build_library

from moet.engine.heartbeat import Page
from moet.kernels.cpu import isa_available
from moet.testing.toy import FAMILIES, write_toy_checkpoint

from . import dequantised, incomplete

DRIVER = Path(__file__).with_name("drive.py")
SIZES = {"hidden": 128, "intermediate": 96, "experts": 16, "top_k": 4}
REFERENCE = {"additional_config": {"moet": {"arithmetic": "reference"}}}

# What each refused engine asks for.
REFUSED: dict[str, dict[str, Any]] = {
    "lora": {"enable_lora": True},
    "expert parallel": {"enable_expert_parallel": True},
    "backend": {"moe_backend": "triton"},
    "setting": {"additional_config": {"moet": {"arithmetics": "kernels"}}},
    "value": {"additional_config": {"moet": {"arithmetic": "numpy"}}},
}

# Tensors that a copy of the checkpoint lacks: a whole parameter of the engine, and a third of one.
LACKING = {
    "norm": "model.layers.0.input_layernorm.weight",
    "query": "model.layers.1.self_attn.q_proj.weight",
}


def jobs(root: Path) -> list[dict[str, Any]]:
    """All engines, by what they are for."""

    def job(name: str, model: str = "qwen3_moe", form: str = "moet", **more: Any) -> dict[str, Any]:
        return {"name": name, "model": str(root / model), "load_format": form, **more}

    kernels = [job(f"isa {isa}", env={"MOET_ISA": isa}) for isa in isa_available()]
    refused = [job(f"refused {name}", engine=engine) for name, engine in REFUSED.items()]
    return [
        job("plain", judge=True, env={"MOET_HEARTBEAT": str(root / "beat")}),
        *(job(f"threads {n}", env={"MOET_THREADS": str(n)}) for n in (1, 2, 3)),
        *kernels,
        job("reference", engine=REFERENCE, env={"MOET_HEARTBEAT": str(root / "slow beat")}),
        job("stock", model="bf16", form="auto"),
        job("fp32", judge=True, engine={"dtype": "float32"}),
        job("fp16", judge=True, engine={"dtype": "float16"}),
        job("gpt-oss", model="gpt_oss", judge=True),
        job("gpt-oss reference", model="gpt_oss", engine=REFERENCE),
        *refused,
        job("v4 layers", model="deepseek_v4", layers=True),
        job("refused isa", env={"MOET_ISA": "neon", "MOET_HEARTBEAT": str(root / "sad")}),
        job("refused experts", model="bf16"),
        *(job(f"refused {name}", model=f"without {name}") for name in LACKING),
        job("takeover", deed="takeover", env={"MOET_HEARTBEAT": str(root / "idle")}),
        job("refused reload", deed="reload"),
        job("refused stray", deed="stray"),
        job("compiled", eager=False, judge=True),
    ]


class Runs:
    """The results of all engines, by job name; and where they left their files."""

    def __init__(self, root: Path, results: dict[str, dict[str, Any]]) -> None:
        self.root = root
        self._results = results

    def __getitem__(self, name: str) -> dict[str, Any]:
        """The result of an engine that worked."""
        result = self._results[name]
        assert "error" not in result, (name, result["error"])
        return result

    def error(self, name: str) -> dict[str, Any]:
        """What ended an engine that did not."""
        error: dict[str, Any] = self._results[name]["error"]
        return error


def drive(root: Path, wanted: list[dict[str, Any]]) -> Runs:
    """Runs engines in a process of their own."""
    (root / "jobs.json").write_text(json.dumps(wanted))
    log, environ = root / "log", {k: v for k, v in os.environ.items() if k[:5] != "MOET_"}
    with log.open("w") as out:
        command = [sys.executable, str(DRIVER), str(root / "jobs.json"), str(root / "results.json")]
        done = subprocess.run(
            command, check=False, stdout=out, stderr=out, env=environ, timeout=900
        )
    assert done.returncode == 0, log.read_text()[-4000:]
    return Runs(root, json.loads((root / "results.json").read_text()))


@pytest.fixture(scope="session")
def emulated_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The GPU kernels compiled for the host. Skips where there is no compiler."""
    return build_library(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(scope="session")
def engine_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small checkpoint of each family. Skips where there is no engine."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: pip install moet[cpu]")
    root = tmp_path_factory.mktemp("engines")
    for family in FAMILIES:
        write_toy_checkpoint(root / family, family, shards=2, **SIZES)
    dequantised.write(root / "qwen3_moe", root / "bf16")
    for name, tensor in LACKING.items():
        incomplete.write(root / "qwen3_moe", root / f"without {name}", tensor)
    return root


@pytest.fixture(scope="session")
def runs(engine_root: Path) -> Runs:
    """Every engine of ``jobs``, run."""
    for name in ("beat", "slow beat", "sad", "idle"):
        Page.create(engine_root / name)
    return drive(engine_root, jobs(engine_root))
