"""Shared parts of the tests of hooks: a small trainer on every face, a stop at step 15, images."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch import nn

import treadle
from treadle.engine import Engine
from treadle.faces.step import BaseTrainer
from treadle.hooks import BaseHook, CheckpointingHook, LoggingHook
from treadle.task import StepOutput


class Small(BaseTrainer):
    """Trainer with four batches per epoch; the record ``step`` of each step is its number."""

    def __init__(self, max_steps, workspace, hooks=()):
        super().__init__(max_steps, workspace=workspace, device="cpu")
        self.given_hooks = hooks

    def build_data_loader(self):
        return [torch.full((2, 3), float(i)) for i in range(4)]

    def build_model(self):
        torch.manual_seed(0)
        return nn.Linear(3, 1)

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.01)

    def forward(self, input):
        loss = ((self.model(input) - 1) ** 2).mean()
        return StepOutput(loss, {"number": self.step}, num_samples=len(input))

    def build_hooks(self):
        return list(self.given_hooks)


class Stop(BaseHook):
    """Hook that ends the run like a crash, after the log point of a step."""

    def __init__(self, step):
        self.at = step

    def on_after_step(self, trainer):
        if trainer.step == self.at:
            raise RuntimeError("stopped")


class EpochEnd(BaseHook):
    """Hook that logs after each epoch, at a step that has been logged already."""

    def on_after_epoch(self, trainer):
        trainer.log({"epoch_end": {"number": trainer.step}})


def stop_at_15_and_resume_from_10(workspace, tracker, max_steps=20):
    """Run to step 15 and stop, then resume from the checkpoint of step 10 to the end; log every step."""
    hooks = [LoggingHook(1, sync=False), EpochEnd(), tracker(), CheckpointingHook(10)]
    with pytest.raises(RuntimeError, match="stopped"):
        Small(max_steps, workspace, [*hooks, Stop(15)]).train()
    wait_for_the_next_second()
    hooks = [LoggingHook(1, sync=False), EpochEnd(), tracker(), CheckpointingHook(10)]
    trainer = Small(max_steps, workspace, hooks)
    trainer.train()
    assert trainer.step == max_steps
    return trainer


def wait_for_the_next_second():
    """Wait, since trackers name files by the second, and real processes never start within the same one."""
    time.sleep(1.01 - time.time() % 1)


def bare_engine(workspace=None, hooks=(), step=0):
    """Return an engine whose hooks can be called by hand."""
    model = nn.Linear(3, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.01), SquareTask(), device="cpu", hooks=hooks)
    engine.workspace = workspace
    engine.progress.step = step
    return engine


class SquareTask:
    def step(self, model, batch, totals=None, generator=None):
        return StepOutput(((model(batch) - 1) ** 2).mean(), {"size": len(batch)}, num_samples=len(batch))


def run_engine(workspace, hooks):
    engine = bare_engine(workspace, hooks)
    engine.run([torch.ones(2, 3)] * 3, max_steps=4)
    return engine


def run_mini(workspace, hooks):
    trainer = Small(4, workspace, hooks)
    trainer.train()
    return trainer


def run_spectra(workspace, hooks):
    import spectra_kit

    trainer = spectra_kit.make(workspace, epochs=1, hooks=hooks)
    trainer.fit(1)
    return trainer._engine


def run_functional(workspace, hooks):
    import functional_kit

    trainer = functional_kit.make(hooks=hooks)
    trainer.train(functional_kit.loader(16, 4), 1, functional_kit.loader(5), save_dir=workspace)
    return trainer._engine


def run_graphs(workspace, hooks):
    import graph_kit

    trainer = graph_kit.make(workspace, hooks=hooks)
    trainer.fit(graph_kit.loader(graph_kit.graphs(16)), graph_kit.loader(graph_kit.graphs(5, seed=1)), 1)
    return trainer._engine


FACES = {
    "engine": run_engine, "mini": run_mini, "spectra": run_spectra, "functional": run_functional, "graphs": run_graphs,
}  # fmt: skip


def picture(value=0, size=4):
    image = pytest.importorskip("PIL.Image")
    return image.fromarray(np.full((size, size, 3), value, dtype=np.uint8))


def all_hooks():
    """Return one of each hook that writes or measures, cheapest first."""
    return [
        treadle.CudaMaxMemoryHook(),
        treadle.ThroughputHook(interval=2),
        treadle.ImageFileLoggerHook(),
        treadle.JsonlHook(),
        treadle.ProfilerHook(wait=0, warmup=1, active=1),
        treadle.TensorBoardHook(),
        treadle.WandbHook(project="test"),
        treadle.MlflowHook(),
    ]


def killable_hooks():
    """Return the trackers that must send each point at once."""
    trackers = [treadle.JsonlHook(), treadle.TensorBoardHook(), treadle.WandbHook()]
    return [LoggingHook(1), *trackers, CheckpointingHook(10)]
