"""Resource use over half a million steps: memory, descriptors, threads, log size and step time.

    python benchmarks/long_run.py                   # some minutes, writes results/long_run.*
    python benchmarks/long_run.py --tiny            # a trial, writes nothing

One run of a tiny model by an EpochTrainer, with everything that a careful user turns on: a shuffling DataLoader, a
validation after each epoch and another one in a hook, an average, progress, the logs of steps and sessions, and
checkpoints that are written in the background. For each tenth of the run: the cost of a step, and at its end the memory
of the process, blocks of Python, objects known to the collector, open descriptors, threads, bytes of the step log for
each step of the tenth, and the size of the newest checkpoint. Anything that grows with the steps shows in one of these
columns.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe, write_result
from scale import resident
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from treadle import (
    BaseHook,
    BestRule,
    CheckpointingHook,
    EmaHook,
    Engine,
    EpochTrainer,
    LoggingHook,
    ProgressHook,
    StepOutput,
    ThroughputHook,
    set_seed,
)
from treadle.hooks import SessionLogHook, StepLogHook

COLUMNS = (
    "steps", "µs a step", "processor µs a step", "memory (MiB)", "blocks of Python", "objects known to gc",
    "descriptors", "threads", "bytes of step log a step", "newest checkpoint (bytes)",
)  # fmt: skip
TENTHS = 10


class MeanSquare:
    """Task with the mean squared error as loss."""

    def step(self, model: nn.Module, batch: Any, totals: Any = None, generator: Any = None) -> StepOutput:
        x, y = batch
        return StepOutput(nn.functional.mse_loss(model(x), y), weight=float(len(x)))


class Gauge(BaseHook):
    """Hook that reads every gauge after each tenth of the run, and evaluates occasionally, as users' hooks do."""

    def __init__(self, folder: Path, *, interval: int, evaluates: int, loader: Any):
        self.folder, self.interval, self.evaluates, self.loader = folder, interval, evaluates, loader
        self._measured: list[dict[str, Any]] = []
        self._logged = 0

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self._measured

    def on_before_train(self, trainer: Engine) -> None:
        self._clocks = time.perf_counter(), time.process_time()

    def on_after_step(self, trainer: Engine) -> None:
        if trainer.step % self.evaluates == 0:
            trainer.evaluate(self.loader)
        if trainer.step % self.interval == 0:
            self._measured.append(self._row(trainer.step))
            self._clocks = time.perf_counter(), time.process_time()

    def _row(self, step: int) -> dict[str, Any]:
        wall, processor = time.perf_counter() - self._clocks[0], time.process_time() - self._clocks[1]
        gc.collect()
        logged = (self.folder / "steps.jsonl").stat().st_size
        newest = max(self.folder.glob("checkpoints/*.pt"), key=lambda path: path.stat().st_mtime_ns, default=None)
        row = {
            "steps": f"{step - self.interval:,} to {step:,}",
            "µs a step": f"{1e6 * wall / self.interval:,.0f}",
            "processor µs a step": f"{1e6 * processor / self.interval:,.0f}",
            "memory (MiB)": f"{resident():,.1f}",
            "blocks of Python": f"{sys.getallocatedblocks():,}",
            "objects known to gc": f"{len(gc.get_objects()):,}",
            "descriptors": entries_of("fd"),
            "threads": entries_of("task"),
            "bytes of step log a step": f"{(logged - self._logged) / self.interval:,.1f}",
            "newest checkpoint (bytes)": f"{newest.stat().st_size:,}" if newest else "none",
        }
        self._logged = logged
        return row


def entries_of(name: str) -> int | str:
    """Return the number of descriptors (``fd``) or threads (``task``) of this process, if /proc exists."""
    try:
        return len(os.listdir(f"/proc/self/{name}"))
    except OSError:
        return ""


def long_run(steps: int, *, epoch: int = 1000) -> list[dict[str, Any]]:
    """Train for a number of steps and return a row for each tenth."""
    logger = logging.getLogger("benchmark.long_run")
    logger.propagate = False
    set_seed(0)
    x = torch.randn(4 * epoch, 8)
    train = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    val = DataLoader(TensorDataset(x[:64], x[:64].sum(1, keepdim=True)), batch_size=32)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gauge = Gauge(folder, interval=steps // TENTHS, evaluates=epoch * 5 // 2, loader=val)
        hooks = [
            EmaHook(0.999), ProgressHook(500), LoggingHook(500), ThroughputHook(500),
            StepLogHook(folder / "steps.jsonl"), SessionLogHook(folder / "sessions.jsonl"),
            CheckpointingHook(epoch, keep_previous=2, path=folder / "checkpoints", background=True), gauge,
        ]  # fmt: skip
        engine = Engine(
            model, torch.optim.AdamW(model.parameters(), lr=1e-4), MeanSquare(), device="cpu", grad_clip=1.0,
            hooks=hooks, logger=logger, progress=False,
        )  # fmt: skip
        EpochTrainer(engine, best=BestRule("val_loss")).fit(train, val, steps // epoch)
    return gauge.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500_000)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.tiny:
        print(*long_run(400, epoch=20), sep="\n")
        return
    title = f"A run of {options.steps:,} steps with evaluations, logs and checkpoints in the background"
    write_result("long_run", title, COLUMNS, long_run(options.steps), describe())


if __name__ == "__main__":
    main()
