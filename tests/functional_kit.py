"""Small reproducible trainers of the functional face."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle
from helpers import Scalar


def loader(samples=20, batch_size=8, *, shuffle=False, seed=5, workers=0):
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed))
    return DataLoader(
        TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size, shuffle=shuffle, num_workers=workers
    )


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))


def line():
    """Return the same single layer each time."""
    torch.manual_seed(3)
    return nn.Linear(4, 1)


def make(cls=None, *, seed=0, model=None, optimizer=None, loss_fn="mse", scheduler=None, lr=0.01, config=None, **rest):
    """Return a trainer; ``scheduler`` makes one from the optimizer, ``rest`` are settings or arguments."""
    treadle.set_seed(seed)
    model = net() if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=lr) if optimizer is None else optimizer
    own = {name: rest.pop(name) for name in ("hooks", "eval_seed", "metrics") if name in rest}
    config = {"training": {"log_interval": None, **rest}} if config is None else config
    return (cls or treadle.Trainer)(
        model, optimizer, nn.MSELoss() if loss_fn == "mse" else loss_fn, config, "cpu",
        None if scheduler is None else scheduler(optimizer), **own,
    )  # fmt: skip


class Given(treadle.Trainer):
    """Trainer whose loss is the mean of the batch times its single weight, so that results can be computed by hand."""

    def _compute_loss(self, outputs, targets):
        return outputs.mean()


def scalar(cls=Given, *, lr=0.0, **rest):
    """Return a trainer with one weight, initially 1: on a batch g the loss is mean(g) and so is the gradient."""
    model = Scalar(1.0)
    return make(cls, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=lr), loss_fn=None, **rest)


def evaluations(values, key="loss"):
    """Return a trainer class whose evaluations return the given values in turn."""

    class Told(Given):
        def evaluate(self, dataloader):
            return {key: told.pop(0)}

    told = list(values)
    return Told


def constant(value, size=4):
    return torch.full((size,), float(value))


def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.model.state_dict().values(), b.model.state_dict().values()))


class Tagger(nn.Module):
    """Model with scores of 5 classes for each of 6 positions; with labels, also its own loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, x, labels=None):
        scores = self.layers(x).transpose(1, 2)
        return scores if labels is None else {"loss": nn.functional.cross_entropy(scores, labels)}
