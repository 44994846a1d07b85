"""Train moet-tiny on one GPU within a time limit: python -m training.train --out FOLDER."""

from __future__ import annotations

import json
import multiprocessing
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from training.checkpoint import load_masters, save_export, save_masters
from training.evaluate import Exam, evaluate, padded, prepare
from training.export import write_json
from training.feeder import Feeder, Pool
from training.geometry import Geometry
from training.load import load
from training.model import TinyMoe
from training.optim import Optimizers
from training.plan import LENGTHS, Plan, length, parse, rate
from training.usage import skew

LOG_EVERY = 25
USAGE_ROWS = 32


def weighted_loss(hidden: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy under weights. hidden [N, H], targets and weights [N]."""
    logits = functional.linear(hidden, embedding.to(hidden.dtype)).float()
    losses = functional.cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp(min=1.0)


class Trainer:
    """The state of a run."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.device = plan, device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = TinyMoe(Geometry(), dtype)
        if plan.start_from:
            self.model.load_state_dict(load_masters(Path(plan.start_from)))
        self.model.to(device)
        self.loss = weighted_loss
        if plan.compile:
            self.model.compile()
            self.loss = torch.compile(weighted_loss)
        rates = {"muon_lr": plan.muon_lr, "adam_lr": plan.adam_lr, "decay": plan.weight_decay}
        self.optimizers = Optimizers(self.model, **rates)
        self.rng, self.draws = Random(plan.seed), np.random.default_rng(plan.seed)
        self.steps = self.tokens = 0

    def batch(self, pool: Pool) -> tuple[Tensor, Tensor, Tensor]:
        """ids [rows, length], next tokens [N], weights [N]."""
        ids, weights = pool.draw(self.draws, max(1, self.plan.step_tokens // pool.length))
        ids_t = torch.from_numpy(ids.view(np.int16)).to(self.device).long()
        weights_t = torch.from_numpy(weights).to(self.device).float() / 100
        weights_t[:, 0] = 0.0
        return ids_t, ids_t.roll(-1, 1).flatten(), weights_t.roll(-1, 1).flatten()

    def step(self, pool: Pool, factor: float) -> Tensor:
        """One update; returns [loss, balance, z] on the device."""
        ids, targets, weights = self.batch(pool)
        hidden, routing = self.model(ids, fast=True)
        loss = self.loss(hidden, self.model.model.embed_tokens.weight, targets, weights)
        balance, z = routing[:, 0].mean(), routing[:, 1].mean()
        excess = functional.relu(routing[:, 0] - self.plan.tilt).mean()
        (loss + self.plan.balance * excess + self.plan.z * z).backward()
        self.optimizers.step(factor)
        self.steps += 1
        self.tokens += ids.numel()
        return torch.stack((loss, balance, z)).detach()

    @torch.no_grad()
    def usage(self, feeder: Feeder, exam: Exam) -> dict[str, Any]:
        """Expert use over fresh batches of every length, and for each kind of task alone."""

        def load(ids: Tensor) -> Tensor:
            return self.model(ids)[1][:, 2:]

        whole = torch.stack([load(self.batch(p)[0]) for p in feeder.pools.values()]).mean(0)
        by_kind = {}
        for kind, items in exam.items():
            middle = items[len(items) // 2 :][:USAGE_ROWS]
            by_kind[kind] = skew(load(padded(middle, self.device)))
        return {"mixture": skew(whole), "by_kind": by_kind}


def wait_for_rows(feeder: Feeder, seconds: float) -> None:
    """Until every pool holds a few rows a worker."""
    end = time.monotonic() + seconds
    while min(p.ready() for p in feeder.pools.values()) == 0:
        if not feeder.alive() or time.monotonic() > end:
            raise RuntimeError("the data workers produced nothing")
        time.sleep(0.2)


class Log:
    """Lines to the screen, rows to the record."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.curve: list[dict[str, Any]] = []

    def say(self, **values: Any) -> None:
        """One line."""
        row = {"at": round(time.monotonic() - self.began, 1), **values}
        self.curve.append(row)
        print(json.dumps(row), flush=True)


def loop(trainer: Trainer, feeder: Feeder, log: Log, exam: Exam) -> None:
    """Train until the clock says stop; probe now and then."""
    plan = trainer.plan
    start = time.monotonic()
    end = log.began + plan.seconds
    probe = start + plan.probe_every
    sums: dict[int, list[Tensor]] = {n: [] for n in feeder.pools}
    while (now := time.monotonic()) < end:
        progress = (now - start) / (end - start)
        n = length(trainer.rng, progress)
        sums[n].append(trainer.step(feeder.pools[n], rate(plan, progress)))
        if trainer.steps % LOG_EVERY == 0:
            means = {k: torch.stack(v).mean(0).tolist() for k, v in sums.items() if v}
            loss = {k: [round(x, 4) for x in v] for k, v in means.items()}
            sums = {k: [] for k in sums}
            if trainer.steps % (LOG_EVERY * 8) == 0 or trainer.steps <= 2 * LOG_EVERY:
                tokens = round(trainer.tokens / 1e6, 1)
                fresh = round(feeder.fresh_tokens() / 1e6, 1)
                log.say(step=trainer.steps, mtokens=tokens, fresh=fresh, loss=loss)
        if now > probe:
            log.say(probe=evaluate(trainer.model, exam))
            save_masters(trainer.model, Path(plan.out))
            save_export(trainer.model, Path(plan.tokenizer), Path(plan.out))
            probe = time.monotonic() + plan.probe_every


def final(trainer: Trainer, folder: Path, exam: Exam) -> dict[str, Any]:
    """The figures of the export as read back from its files."""
    state, _ = load(folder)
    trainer.model.load_state_dict(state)
    return {"samples_per_kind": trainer.plan.final_samples, **evaluate(trainer.model, exam)}


def main() -> None:
    """Train, export, read back, measure, record."""
    began = time.monotonic()
    plan = parse()
    out, vocabulary = Path(plan.out), Path(plan.tokenizer) / "tokenizer.json"
    out.mkdir(parents=True, exist_ok=True)
    feeder = Feeder(vocabulary, LENGTHS, plan.workers, plan.seed)
    aside = ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
    probes = aside.submit(prepare, vocabulary, plan.probe_samples, 7)
    exam = aside.submit(prepare, vocabulary, plan.final_samples, 0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer, log = Trainer(plan, device), Log(began)
    wait_for_rows(feeder, 60.0)
    log.say(ready=feeder.fresh_tokens())
    loop(trainer, feeder, log, probes.result())
    trained = time.monotonic() - began
    save_masters(trainer.model, out)
    folder = save_export(trainer.model, Path(plan.tokenizer), out)
    figures, usage = final(trainer, folder, exam.result()), trainer.usage(feeder, exam.result())
    feeder.stop()
    record = {
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "plan": asdict(plan),
        "geometry": asdict(trainer.model.g),
        "steps": trainer.steps,
        "tokens": trainer.tokens,
        "fresh_tokens": feeder.fresh_tokens(),
        "train_seconds": round(trained, 1),
        "wall_seconds": round(time.monotonic() - began, 1),
        "heldout": figures,
        "expert_usage": usage,
        "curve": log.curve,
    }
    write_json(out / "record.json", record)
    print(
        json.dumps(
            {"heldout": figures, "busiest_fifth": usage["mixture"]["busiest_fifth"]}, indent=1
        )
    )


if __name__ == "__main__":
    main()
