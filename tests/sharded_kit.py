"""Engines whose states are saved on some ranks and loaded on others, for tests of sharded checkpoints."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from step_kit import engine_of
from treadle import CheckpointingHook, set_seed
from treadle.checkpoint.sharded import extract_tensors
from treadle.data import RankBatchSampler
from treadle.hooks import BaseHook, EmaHook
from treadle.task import StepOutput


class Net(nn.Module):
    """Model with tied weights, a parameter with fewer rows than three ranks, a buffer, and random numbers."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(3, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Dropout(0.2)) for _ in range(2))
        self.narrow = nn.Linear(7, 2)
        self.outward = nn.Linear(2, 7)
        self.again = nn.Linear(3, 7)
        self.again.weight = self.inward.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += 1
        y = self.inward(x) + self.again(x.flip(-1))
        for block in self.blocks:
            y = y + block(y).tanh()
        return self.outward(self.narrow(y))


class Fit:
    def step(self, model, batch, totals=None, generator=None):
        return StepOutput((model(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean())


class Cut(BaseHook):
    """Hook that ends a run after a step."""

    def __init__(self, step):
        self.step = step

    def on_after_step(self, trainer):
        trainer.should_stop = trainer.should_stop or trainer.step == self.step


def loader(samples=24):
    """Return a loader with four steps per epoch on two ranks; twelve samples per rank give as many on others."""
    rows = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(rows), batch_sampler=RankBatchSampler(samples, 3, shuffle=True, seed=5))


def engine(kind, folder=None, *, hooks=(), seed=0, task=None, **saving):
    """Return an engine with averages that saves to ``folder``; ``kind`` is None, "ddp", "fsdp" or "hsdp"."""
    set_seed(seed)
    settings = {"interval": 1, "keep_previous": None, **saving}
    kept = [CheckpointingHook(path=folder, **settings)] if folder is not None else []
    hooks = [EmaHook(0.5), *hooks, *kept]
    kind, spread = ("fsdp", {"replicas": 2}) if kind == "hsdp" else (kind, None)
    task = task or Fit()
    return engine_of(kind, make=torch.optim.AdamW, lr=0.05, task=task, model=Net(), hooks=hooks, settings=spread)


def run(kind, folder, steps, **settings):
    """Train to a step, resuming if possible; a run that has already reached it only loads."""
    made = engine(kind, folder, **settings)
    made.run(loader(), max_steps=steps)
    return made


def tensors_of(trainer):
    """Return weights, optimizer state and averages by key, gathered on rank 0; all ranks must call this."""
    return extract_tensors(trainer.state_dict())[0]


def differing(mine, other):
    """Return the keys whose tensors are not equal to the bit."""
    assert mine.keys() == other.keys()
    assert len(mine) > 30
    return [key for key, value in mine.items() if not torch.equal(value, other[key])]
