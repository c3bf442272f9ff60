"""Small regression trained alike by one process, replicas and sharded models, for tests of steps on ranks."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn

from treadle.engine import Engine
from treadle.faces.parallel import parallelize
from treadle.task import StepOutput


class Net(nn.Module):
    """Model with a list of blocks, a norm, and a head tied to the first layer."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 7), nn.GELU()) for _ in range(2))
        self.narrow = nn.Linear(7, 5)
        self.outward = nn.Linear(5, 7)
        self.outward.weight = self.inward.weight

    def forward(self, x):
        x = self.inward(x)
        for block in self.blocks:
            x = x + block(x)
        return self.outward(self.narrow(x))


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


class Rows:
    """Task with the mean over the rows of a batch, weighted by their number; an empty batch has no loss."""

    def __init__(self, run_empty=True):
        self.run_empty = run_empty

    def step(self, model, batch, totals=None, generator=None):
        if len(batch) == 0:
            if self.run_empty:
                model(torch.zeros(1, 5))
            return StepOutput(None)
        errors = (model(batch) - batch.sum(1, keepdim=True)).square().mean(1)
        return StepOutput(errors.mean(), {"size": float(len(batch))}, weight=float(len(batch)))


def batches(sizes, seed=1):
    """Return a micro-batch with the given number of rows for each number."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 5, generator=generator) for size in sizes]


def share(rank, ranks, sizes, seed=1):
    """Return this rank's micro-batches; ``sizes`` has those of all ranks in turn."""
    return batches([size for moment in sizes for size in moment], seed)[rank::ranks]


def engine_of(kind, *, make=torch.optim.SGD, lr=0.02, task=None, settings=None, model=None, **rest):
    """Return an engine over a model of ``kind``, None, "ddp" or "fsdp"; the optimizer is created before wrapping."""
    model = net() if model is None else model
    optimizer = make(model.parameters(), lr=lr)
    if kind is not None:
        model = parallelize(model, kind, optimizer=optimizer, **(settings or {}))
    return Engine(model, optimizer, task or Rows(), device="cpu", **rest)


def whole(model):
    """Return the weights by name, gathered from all ranks; a collective if the model is sharded."""
    state = model.state_dict()
    return {
        name.removeprefix("module."): (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in state.items()
    }


def train(kind, sizes, k=1, **rest):
    """Train over all micro-batches, k per step; return weights, norms and the outcome of each step."""
    from treadle.engine.hook import BaseHook

    said = []

    class Note(BaseHook):
        def on_after_step(self, trainer):
            info = trainer.step_info
            said.append((float(info["applied"]), float(info.get("grad_norm", -1.0))))

    ranks, rank = (dist.get_world_size(), dist.get_rank()) if kind is not None else (len(sizes[0]), None)
    hooks = [*rest.pop("hooks", []), Note()]
    steps = len(sizes) // k
    if kind is None:
        engine = engine_of(None, accumulation_steps=k * ranks, hooks=hooks, **rest)
        engine.run(share(0, 1, sizes), max_steps=steps)
    else:
        engine = engine_of(kind, accumulation_steps=k, hooks=hooks, **rest)
        engine.run(share(rank, ranks, sizes), max_steps=steps)
    return {"weights": whole(engine.model), "said": said, "engine": engine}


def differing(mine, other, tolerance=2e-6):
    """Return the names of weights that differ by more than ``tolerance``."""
    assert mine.keys() == other.keys()
    return [name for name, value in mine.items() if not torch.allclose(value, other[name], atol=tolerance, rtol=1e-5)]


class Counting:
    """Counter of torch.distributed calls inside the block."""

    KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")

    def __enter__(self):
        self.calls = Counter()
        self.originals = {name: call for name, call in vars(dist).items() if name.startswith(self.KINDS)}
        for name, original in self.originals.items():
            setattr(dist, name, self.counted(name, original))
        return self

    def counted(self, name, original):
        def call(*args, **kwargs):
            self.calls[name] += 1
            return original(*args, **kwargs)

        return call

    def __exit__(self, *_):
        for name, original in self.originals.items():
            setattr(dist, name, original)
