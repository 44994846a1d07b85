"""How far quantised activations are from the truth: measured, recorded, rendered.

    python benchmarks/error_tables.py [--activations FILE.npz ...] [--model FOLDER]

writes `benchmarks/records/numerics-errors.json` and renders `docs/numerics-errors.md` from it
(`--render` does only the latter). An activations file holds arrays [tokens, K], fp32, fp16 or bf16
bits as uint16, named by layer: `layer3.x` is the input of the experts of layer 3, `layer3.h` their
middle, one row a routing; `record_activations.py` writes one. With the model's folder, whole
experts are computed on `x` as well.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from activation_formats import F64, FORMATS
from error_page import render

from moet.formats import mxfp4
from moet.formats.mxint import ActFormat, quantise
from moet.formats.tiling import ExpertWeights
from moet.kernels.reference import expert_rows, gates
from moet.kernels.rounding import widen_bf16
from moet.kernels.spec import GateKind, LayerSpec
from moet.machine.cpu import read_cpu

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks/records/numerics-errors.json"
PAGE = ROOT / "docs/numerics-errors.md"
SEED = 20261201
BLOCK = 32

Table = dict[str, dict[str, float | None]]


def to_bf16(x: F64) -> F64:
    """RN to bf16, as the engine hands activations over."""
    return FORMATS["bf16"](x)


def sqnr(true: F64, got: F64) -> float | None:
    """Signal to quantisation noise in dB; None where there is no noise."""
    noise = float(np.square(got - true).sum())
    return None if noise == 0 else 10 * np.log10(float(np.square(true).sum()) / noise)


def relative_error(true: F64, got: F64) -> float:
    """Norm of the difference over the norm of the truth."""
    return float(np.linalg.norm(got - true) / np.linalg.norm(true))


# ---- synthetic signals


def silu(x: F64) -> F64:
    """x / (1 + e^-x) in fp64."""
    return x / (1 + np.exp(-x))


def with_outliers(rng: np.random.Generator, shape: tuple[int, int], size: float) -> F64:
    """Gaussian blocks of 32 along the last axis, element 0 of each being about +-size."""
    x = rng.standard_normal(shape)
    outliers = size * rng.uniform(0.8, 1.2, x[:, ::BLOCK].shape)
    x[:, ::BLOCK] = outliers * rng.choice([-1, 1], outliers.shape)
    return x


SIGNALS: dict[str, Callable[[np.random.Generator, tuple[int, int]], F64]] = {
    "Gaussian": lambda rng, n: rng.standard_normal(n),
    "Laplace": lambda rng, n: rng.laplace(size=n),
    "Student-t(3)": lambda rng, n: rng.standard_t(3, n),
    "Student-t(2)": lambda rng, n: rng.standard_t(2, n),
    "log-normal s=1": lambda rng, n: rng.lognormal(0, 1, n) * rng.choice([-1, 1], n),
    "log-normal s=2": lambda rng, n: rng.lognormal(0, 2, n) * rng.choice([-1, 1], n),
    "log-normal s=3": lambda rng, n: rng.lognormal(0, 3, n) * rng.choice([-1, 1], n),
    "SwiGLU N(0,1)^2": lambda rng, n: silu(rng.standard_normal(n)) * rng.standard_normal(n),
    "SwiGLU N(-1,2) x N(0,2)": lambda rng, n: silu(rng.normal(-1, 2, n)) * rng.normal(0, 2, n),
    "ReLU^2": lambda rng, n: np.square(np.maximum(rng.standard_normal(n), 0)),
}


def others(x: F64) -> F64:
    """All but element 0 of every block."""
    return x.reshape(*x.shape[:-1], -1, BLOCK)[..., 1:]


def signal_table(values: int) -> Table:
    """SQNR in dB of every format on every synthetic signal, rounded to bf16 first."""
    rng, shape = np.random.default_rng(SEED), (values // 4096, 4096)
    table: Table = {}
    for name, draw in SIGNALS.items():
        x = to_bf16(draw(rng, shape))
        table[name] = {f: sqnr(x, convert(x)) for f, convert in FORMATS.items()}
    for size in (30, 300):
        x = to_bf16(with_outliers(rng, shape, size))
        got = {f: convert(x) for f, convert in FORMATS.items()}
        table[f"one {size}x outlier a block, whole"] = {f: sqnr(x, y) for f, y in got.items()}
        table[f"the same, the other 31 ({size}x)"] = {
            f: sqnr(others(x), others(y)) for f, y in got.items()
        }
    return table


def outlier_table(values: int) -> Table:
    """SQNR in dB of the 31 elements beside an outlier, by its size in sigma of the others."""
    rng, shape = np.random.default_rng(SEED + 1), (values // 4096, 4096)
    table: Table = {}
    for size in (4, 6, 7, 8, 10, 16, 30, 100):
        x = to_bf16(with_outliers(rng, shape, size))
        table[f"{size}"] = {
            f: sqnr(others(x), others(FORMATS[f](x)))
            for f in ("MXINT8", "MXFP8 ceil", "MXFP8 floor", "MXINT16")
        }
    return table


def zero_table(values: int) -> Table:
    """Share of the nonzero elements that become 0."""
    rng, shape = np.random.default_rng(SEED + 4), (values // 4096, 4096)
    names = ("Gaussian", "SwiGLU N(0,1)^2", "SwiGLU N(-1,2) x N(0,2)", "log-normal s=2")
    signals = {name: to_bf16(SIGNALS[name](rng, shape)) for name in names}
    signals["one 300x outlier a block"] = to_bf16(with_outliers(rng, shape, 300))
    columns = ("MXINT8", "MXFP8 ceil", "MXFP8 floor", "MXINT16")
    return {
        name: {f: float((FORMATS[f](x)[x != 0] == 0).mean()) for f in columns}
        for name, x in signals.items()
    }


# ---- whole experts


class Expert:
    """One expert in fp64 on dequantised MXFP4 weights; only the activations are quantised."""

    def __init__(
        self, weights: ExpertWeights, kind: GateKind = GateKind.SILU, limit: float | None = None
    ) -> None:
        self.weights = weights
        matrices = (weights.gate, weights.up, weights.down)
        self.gate, self.up, self.down = (mxfp4.dequantise(*m).astype(float) for m in matrices)
        biases = (weights.gate_bias, weights.up_bias, weights.down_bias)
        self.biases = [0.0 if b is None else b.astype(float) for b in biases]
        self.kind, self.limit = kind, limit

    def without(self, columns: slice) -> Expert:
        """The same expert with zero weights in columns of gate and up."""
        other = object.__new__(Expert)
        other.__dict__ = self.__dict__ | {"gate": self.gate.copy(), "up": self.up.copy()}
        other.gate[:, columns] = other.up[:, columns] = 0
        return other

    def middle(self, x: F64) -> F64:
        """h [T, I]: the gate in fp64 with silu, as the contract writes it (fp32) otherwise."""
        g, u = x @ self.gate.T + self.biases[0], x @ self.up.T + self.biases[1]
        if self.kind is not GateKind.SILU:
            h = gates(self.kind, self.limit, g.astype(np.float32), u.astype(np.float32))
            return h.astype(np.float64)
        if self.limit is not None:
            g, u = np.minimum(g, self.limit), np.clip(u, -self.limit, self.limit)
        return silu(g) * u

    def __call__(self, x: F64, convert: Callable[[F64], F64] = lambda x: x) -> F64:
        """out [T, H], with x and h through `convert`."""
        return convert(self.middle(convert(x))) @ self.down.T + self.biases[2]

    def errors(self, x: F64) -> dict[str, float | None]:
        """Relative error of every format on bf16 inputs x [T, H]."""
        true = self(x)
        return {f: relative_error(true, self(x, convert)) for f, convert in FORMATS.items()}


def random_expert(rng: np.random.Generator, hidden: int, intermediate: int) -> Expert:
    """Gaussian weights of standard deviation 1/sqrt(K), in MXFP4; SwiGLU with limit 10."""
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    weights = [
        mxfp4.quantise((rng.standard_normal(s) / np.sqrt(s[1])).astype(np.float32)) for s in shapes
    ]
    return Expert(ExpertWeights(*weights), limit=10.0)


def expert_table(hidden: int, intermediate: int, tokens: int) -> Table:
    """Relative error of a whole random expert."""
    rng = np.random.default_rng(SEED + 2)
    expert = random_expert(rng, hidden, intermediate)
    blind = expert.without(slice(0, None, BLOCK))
    shape = (tokens, hidden)
    table: Table = {}
    for name in ("Gaussian", "Laplace", "Student-t(3)", "log-normal s=1"):
        table[name] = expert.errors(to_bf16(SIGNALS[name](rng, shape)))
    x = rng.standard_normal(shape)
    x[:, rng.choice(hidden, 6, replace=False)] *= 50
    table["6 channels 50x"] = expert.errors(to_bf16(x))
    table["30x in every block"] = expert.errors(to_bf16(with_outliers(rng, shape, 30)))
    for size in (10, 30, 300):
        x = to_bf16(with_outliers(rng, shape, size))
        table[f"{size}x in every block, weight 0 there"] = blind.errors(x)
    return table


def contract_table(hidden: int, intermediate: int, tokens: int) -> Table:
    """Relative error of the rows that `kernels.reference` computes: fp32 sums, E, rows and all."""
    rng = np.random.default_rng(SEED + 2)
    expert = random_expert(rng, hidden, intermediate)
    x = to_bf16(rng.standard_normal((tokens, hidden)))
    true, table = expert(x), {}
    for act in ActFormat:
        spec = LayerSpec(
            hidden=hidden,
            intermediate=intermediate,
            experts=1,
            top_k=1,
            act=act,
            limit=expert.limit,
        )
        rows = expert_rows(spec, expert.weights, quantise(x.astype(np.float32), act))
        ideal = relative_error(true, expert(x, FORMATS[act.name]))
        table[act.name] = {
            "formats alone": ideal,
            "the whole contract": relative_error(true, rows.astype(np.float64)),
        }
    return table


def row_table(tokens: int, width: int) -> Table:
    """Relative error of the bf16 output of 6 slots with bf16 rows and with fp32 rows."""
    rng = np.random.default_rng(SEED + 3)
    weights = rng.dirichlet(np.ones(6), tokens)[:, :, None]
    rows = rng.standard_normal((tokens, 6, width))
    cancelling = rows - rows.mean(1, keepdims=True)
    table: Table = {}
    for name, r in (("independent rows", rows), ("cancelling rows", cancelling)):
        true = (weights * r).sum(1)
        results = {"bf16 rows": (weights * to_bf16(r)).sum(1), "fp32 rows": true}
        table[name] = {k: relative_error(true, to_bf16(v)) for k, v in results.items()}
    return table


# ---- recorded activations


def read_activations(files: Iterable[Path]) -> dict[str, F64]:
    """name -> fp64 [tokens, K] of all files; uint16 arrays hold bf16."""
    found: dict[str, F64] = {}
    for file in files:
        with np.load(file) as arrays:
            for name in arrays.files:
                a = arrays[name]
                wide = widen_bf16(a) if a.dtype == np.uint16 else a
                found[name] = wide.reshape(-1, a.shape[-1]).astype(np.float64)
    return found


def outlier_share(x: F64) -> float:
    """Share of the whole blocks whose largest element is above 7.5 rms of the other 31."""
    blocks = np.abs(x[:, : x.shape[1] // BLOCK * BLOCK].reshape(-1, BLOCK))
    blocks = np.sort(blocks[blocks.max(axis=1) > 0], axis=1)
    rms = np.sqrt(np.square(blocks[:, :-1]).mean(axis=1))
    return float((blocks[:, -1] > 7.5 * rms).mean())


def recorded_table(activations: dict[str, F64]) -> Table:
    """SQNR in dB on recorded activations, and how many blocks have a large outlier."""
    table: Table = {}
    for name, x in sorted(activations.items(), key=lambda item: _layer_order(item[0])):
        table[name] = {f: sqnr(x, convert(x)) for f, convert in FORMATS.items()}
        table[name]["blocks with an outlier above 7.5 sigma"] = outlier_share(x)
    return table


def recorded_setup(activations: dict[str, F64], model: Path | None) -> dict[str, Any]:
    """What was recorded: of which model, and how many rows an array has, at most."""
    rows = {
        end: [len(x) for n, x in activations.items() if n.endswith(end)] for end in (".x", ".h")
    }
    return {
        "model": model.name if model else "",
        "tokens": max(rows[".x"], default=0),
        "routings": max(rows[".h"], default=0),
    }


def _layer_order(name: str) -> tuple[list[int], str]:
    return [int(n) for n in re.findall(r"\d+", name)], name


def model_table(folder: Path, activations: dict[str, F64], experts: int, tokens: int) -> Table:
    """Mean relative error of some of a model's own experts, on recorded inputs spread evenly."""
    from moet.checkpoint.open import open_checkpoint
    from moet.formats.tiling import read_expert
    from moet.hybrid.load import record_layout
    from moet.pack.expert_reader import ExpertReader, OpenFiles

    checkpoint = open_checkpoint(folder)
    geometry, layout, files = checkpoint.geometry, record_layout(checkpoint.geometry), OpenFiles()
    reader = ExpertReader(
        checkpoint.tensors,
        files,
        layout,
        range(geometry.intermediate),
        down_bias=True,
        drop_cache=False,
    )
    inputs = {name: x for name, x in activations.items() if name.endswith(".x")}
    table: Table = {}
    for name, x in sorted(inputs.items(), key=lambda item: _layer_order(item[0])):
        record, errors = np.zeros(layout.record_bytes, np.uint8), []
        for e in np.linspace(0, geometry.experts - 1, experts).astype(int):
            reader.read(checkpoint.expert_tensors(_layer_order(name)[0][0], int(e)), record)
            expert = Expert(read_expert(layout, record), geometry.gate, geometry.limit)
            errors.append(expert.errors(x[:: -(-len(x) // tokens)]))
        table[name] = {f: float(np.mean([e[f] for e in errors])) for f in FORMATS}
    files.close()
    return table


# ---- record and page


def git_commit() -> str:
    """The commit of the checkout, with a plus where files differ from it; empty outside git."""
    try:
        command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12"]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def measure(activations: dict[str, F64], model: Path | None) -> dict[str, Any]:
    """All tables. Takes about a minute on one core, most of it in the whole experts."""
    tables = {
        "signals": signal_table(1 << 20),
        "outliers": outlier_table(1 << 18),
        "zeros": zero_table(1 << 18),
        "experts": expert_table(4096, 2048, 16),
        "contract": contract_table(4096, 2048, 16),
        "rows": row_table(256, 4096),
    }
    if activations:
        tables["recorded"] = recorded_table(activations)
    if activations and model is not None:
        tables["model"] = model_table(model, activations, experts=4, tokens=256)
    return {
        "what": "errors of quantised activations",
        "seed": SEED,
        "commit": git_commit(),
        "machine": {"cpu": read_cpu().model, "numpy": np.__version__},
        "python": platform.python_version(),
        "recorded": recorded_setup(activations, model),
        "tables": tables,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measures, records, renders."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--activations", type=Path, nargs="*", default=[], metavar="FILE.npz")
    parser.add_argument("--model", type=Path, metavar="FOLDER")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--render", action="store_true", help="render the page, measure nothing")
    options = parser.parse_args(arguments)
    if not options.render:
        record = measure(read_activations(options.activations), options.model)
        options.record.write_text(json.dumps(record, indent=1) + "\n")
    options.page.write_text(render(json.loads(options.record.read_text())))
    sys.stderr.write(f"{options.record}\n{options.page}\n")


if __name__ == "__main__":
    main()
