"""Small run with dropout, noise from every generator, a step log and checkpoints; alone or in a population."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import numpy as np
import torch
from torch import nn

from treadle import BaseTrainer, CheckpointingHook, EmaHook, TensorLoader, set_seed

STEPS = 14


def rows(bad=False):
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(40, 6, generator=generator), torch.randn(40, 1, generator=generator)
    if bad:
        x[:] = float("nan")
    return x, y


class Fit(BaseTrainer):
    """Trainer that draws from python's, numpy's and torch's generators in every step, so that mixed-up streams show."""

    def __init__(self, *, seed, lr=0.05, bad=False, steps=STEPS, interval=5, exit_signals=None, hooks=(), **options):
        super().__init__(steps, device="cpu", progress=False, hooks=hooks, **options)
        self.seed, self.lr, self.bad, self.interval, self.exit_signals = seed, lr, bad, interval, exit_signals

    def build_data_loader(self):
        return TensorLoader(*rows(self.bad), batch_size=8, shuffle=True, seed=self.seed)

    def build_model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))

    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=self.lr)

    def build_hooks(self):
        return [
            EmaHook(0.9), CheckpointingHook(self.interval, keep_previous=None, exit_signals=self.exit_signals),
        ]  # fmt: skip

    def forward(self, input):
        x, y = input
        noise = random.random() + float(np.random.rand()) + torch.rand(())
        return (self.model(x * (1 + 0.1 * noise)) - y).square().mean(), {"noise": noise}


def make(seed, workspace, lr=0.05, bad=False, steps=STEPS, exit_signals=None):
    return Fit(seed=seed, lr=lr, bad=bad, steps=steps, workspace=workspace, exit_signals=exit_signals)


def alone(folder, **settings):
    """Train one run like a plain script, and restore the generators afterwards."""
    from treadle.seed import forked_rng

    with forked_rng():
        set_seed(settings["seed"])
        trainer = make(workspace=folder, **settings)
        trainer.train()
    return trainer


def files_of(folder):
    """Return the files of a run except the session log, which holds times."""
    kept = [path for path in sorted(Path(folder).rglob("*")) if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(folder)): path for path in kept if path.name not in ("sessions.jsonl",)}


def same_folder(one, two):
    """Assert that two run folders are equal: names, step logs, every value of the checkpoints."""
    ours, theirs = files_of(one), files_of(two)
    assert list(ours) == list(theirs)
    for name in ours:
        if name.endswith(".pt"):
            assert same(torch.load(ours[name]), torch.load(theirs[name])), name
        elif name.endswith("jsonl"):
            assert ours[name].read_text() == theirs[name].read_text(), name
        else:
            assert settings_in(ours[name]) == settings_in(theirs[name]), name


def settings_in(path):
    """Return the values of a file without the commit of the script's folder, which differs in a separate process."""
    return {key: value for key, value in json.loads(path.read_text()).items() if key != "git_commit"}


def same(one, two):
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return isinstance(two, dict) and list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two or (one != one and two != two)


def make_that_warns(seed):
    logging.getLogger("treadle.engine").warning("%d is odd", seed)
    return lambda: {"seed": seed}
