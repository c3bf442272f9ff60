"""Objects that fresh scripts of users brought: modules out of sight, values of many libraries, files opened late."""

from __future__ import annotations

import array
import copy
import itertools
import statistics
import uuid
from collections import ChainMap, OrderedDict, UserDict, deque
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler as of_torch
from torch.optim.swa_utils import AveragedModel

from strangers.bench import Case, Points, Row, net, points_loader
from treadle.hooks import BaseHook

HOOKS, DATA, MODELS = "Hooks without their own state", "Data sets and collate functions", "Models"
OPTIMIZERS, SCHEDULES = "Optimizers", "Schedules"
STOPS = (2, 7)


# -- optimizers whose state holds more than tensors ---------------------------------------------------------------


class Projector:
    """The low-rank projector that GaLore keeps in the state of each matrix."""

    def __init__(self) -> None:
        self.basis, self.calls = None, 0

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.calls % 3 == 0:
            self.basis = torch.linalg.svd(gradient, full_matrices=False)[2][:1].clone()
        self.calls += 1
        return gradient @ self.basis.T @ self.basis


class Rich(torch.optim.Optimizer):
    """Keeps factors in a list, a name, a shape, int8 momenta in a tuple and a projector."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for one in self.param_groups[0]["params"]:
            state = self.state[one]
            if not state:
                state.update(factors=[torch.eye(size) for size in one.shape], name="rich", shape=tuple(one.shape))
                state.update(quantised=(1.0, torch.zeros_like(one, dtype=torch.int8)))
                if one.dim() == 2:
                    state["project"] = Projector()
            assert state["name"] == "rich"
            assert state["shape"] == tuple(one.shape)
            gradient = state["project"](one.grad) if one.dim() == 2 else one.grad
            state["factors"][0].lerp_(torch.eye(len(one)) * gradient.norm(), 0.1)
            scale, momenta = state["quantised"]
            moved = 0.9 * scale * momenta + gradient
            scale = float(moved.abs().max()) / 127 + 1e-9
            state["quantised"] = scale, (moved / scale).round().to(torch.int8)
            one.sub_(moved / (1 + state["factors"][0].trace()), alpha=0.02)


class Recent:
    """A factor of LambdaLR that keeps a deque."""

    def __init__(self) -> None:
        self.calls = deque([1], maxlen=3)

    def __call__(self, step: int) -> float:
        self.calls.append(self.calls[-1] + 1)
        return 1 / sum(self.calls)


class Drawn(of_torch.LRScheduler):
    """A schedule that draws its rates, whose inherited state dict holds the generator."""

    def __init__(self, optimizer: Any):
        self.chance, self.drawn = np.random.default_rng(1), {}
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        self.drawn[self.last_epoch] = float(self.chance.random())
        return [base * self.drawn[self.last_epoch] for base in self.base_lrs]


def scheduled(make: Any) -> Any:
    return lambda: Case(scheduler=make)


# -- models -------------------------------------------------------------------------------------------------------


class HidesTeacher(nn.Module):
    """A teacher that no state dict of the model shows, in a list or behind the registration of modules."""

    def __init__(self, *, averaged: bool):
        super().__init__()
        self.inner = net()
        if averaged:
            object.__setattr__(self, "teacher", AveragedModel(self.inner))
        else:
            self.teacher = [copy.deepcopy(self.inner)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.inner(x)
        if not self.training:
            return made
        teacher = self.teacher[0] if isinstance(self.teacher, list) else self.teacher
        with torch.no_grad():
            followed = teacher(x)
            if isinstance(teacher, AveragedModel):
                teacher.update_parameters(self.inner)
            else:
                for slow, live in zip(teacher.parameters(), self.inner.parameters(), strict=True):
                    slow.lerp_(live, 0.2)
        return made + 0.3 * (made - followed)


class FillsBuffer(nn.Module):
    """A buffer that is None until the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.register_buffer("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.scale = torch.ones(1) if self.scale is None else self.scale * 0.9
        return self.inner(x) * self.scale


def with_hooks_of_parameters() -> nn.Module:
    model, calls, norms = net(), [0], []

    def damp(gradient: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return gradient / calls[0]

    def scale(parameter: torch.Tensor) -> None:
        norms.append(float(parameter.grad.norm()))
        parameter.grad.div_(1 + sum(norms[-3:]))

    model[0].weight.register_hook(damp)
    model[3].weight.register_post_accumulate_grad_hook(scale)
    return model


# -- data sets ----------------------------------------------------------------------------------------------------


class OpensAndCounts(Points):
    """Opens its file at the first read, and counts and draws beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.handle, self.reads, self.chance, self.hits = None, 0, np.random.default_rng(4), {"all": 0}

    def __getitem__(self, index: int) -> Any:
        self.handle = self.handle or object()
        self.reads, self.hits["all"] = self.reads + 1, self.hits["all"] + 2
        x, y = super().__getitem__(index)
        return x + float(self.chance.random()) / self.reads, y + self.hits["all"] / 100


class Tagged(Points):
    """Tags in arrays of objects, texts, truth values and records."""

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.names = np.array(["easy"] * 12, dtype=object), np.array(["a"] * 12)
        self.mask, self.records = np.zeros(12, dtype=bool), np.zeros(12, dtype=[("reads", "i4"), ("sum", "f8")])

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        hard, shift = self.tags[index] == "hard", ord(self.names[index]) / 100 + self.mask[index]
        shift += self.records["reads"][index] / 10
        self.tags[index], self.names[index] = "hard", chr(ord(self.names[index]) + 1)
        self.mask[index] = not self.mask[index]
        self.records["reads"][index] += 1
        return x * (2.0 if hard else 1.0), y + float(shift)


def transformed_datasets() -> Case:
    import datasets

    from strangers.unseen import OfDicts

    calls = [0]

    def transform(rows: Any) -> Any:
        calls[0] += 1
        x = [torch.tensor(row) + calls[0] / 10 for row in rows["x"]]
        return {"x": x, "y": [row.sum().reshape(1) / 10 for row in x]}

    rows = datasets.Dataset.from_dict({"x": Points().x.tolist()})
    rows.set_transform(transform)
    return Case(loader=points_loader(rows, shuffle=True), task=OfDicts())


# -- hooks --------------------------------------------------------------------------------------------------------


class Settings(dict):
    """A dict with attribute access."""

    __getattr__ = dict.__getitem__


class Losses(list):
    pass


class Ratio(float):
    pass


class OfLibraries(BaseHook):
    """Keeps values of the standard library, of NumPy, and of classes that derive from Python's."""

    def __init__(self) -> None:
        self.array, self.bytes, self.count = array.array("d", [0.0]), bytearray(b"a"), itertools.count(1)
        self.name, self.chain, self.user = uuid.UUID(int=1), ChainMap({"calls": 0}), UserDict(calls=0)
        self.normal, self.masked = statistics.NormalDist(1, 1), np.ma.array([1.0, 2.0], mask=[0, 1])
        self.settings, self.losses, self.ratio = Settings(calls=0), Losses(), Ratio(1)
        self.sparse, self.parameter = torch.eye(2).to_sparse(), nn.Parameter(torch.ones(1))
        self.day = np.datetime64(1, "D")
        self.modules = OrderedDict(follower=net())

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Any) -> None:
        self.array.append(1.0)
        self.bytes.append(98)
        self.chain["calls"] += 1
        self.user["calls"] += 1
        self.settings["calls"] += 1
        self.losses.append(1)
        self.masked[0] += 1
        self.sparse.mul_(0.9)
        self.parameter.add_(1)
        self.day += np.timedelta64(1, "D")
        self.name, self.normal, self.ratio = uuid.UUID(int=self.name.int + 1), self.normal + 1, Ratio(self.ratio + 1)
        total = [len(self.array), len(self.bytes), next(self.count), self.chain["calls"], self.user["calls"]]
        total += [self.settings.calls, len(self.losses), float(self.masked[0]), float(self.sparse.to_dense().sum())]
        total += [float(self.parameter), self.day.astype(int), self.name.int, self.normal.mean, self.ratio]
        for slow, one in zip(self.modules["follower"].parameters(), trainer.model.parameters(), strict=True):
            slow.lerp_(one, 0.3)
            one.grad.div_(sum(total)).add_(one - slow, alpha=0.1)


def row(name: str, kind: str, make: Any, needs: tuple[str, ...] = ()) -> Row:
    return Row(name, kind, make, (), needs, stops=STOPS)


FRESH = [
    row("factors in a list, strings, int8 in a tuple, an object in the state", OPTIMIZERS, lambda: Case(
        optimizer=lambda model: Rich(model.parameters()))),
    row("LambdaLR with an object with a deque", SCHEDULES, scheduled(
        lambda of: of_torch.LambdaLR(of, Recent()))),
    row("a schedule with a NumPy generator, state dict inherited", SCHEDULES, scheduled(Drawn)),
    row("a teacher in a list on the model", MODELS, lambda: Case(model=HidesTeacher(averaged=False))),
    row("an unregistered AveragedModel", MODELS, lambda: Case(model=HidesTeacher(averaged=True))),
    row("a buffer that is None at first", MODELS, lambda: Case(model=FillsBuffer())),
    row("parameter hooks with closures over counters", MODELS, lambda: Case(model=with_hooks_of_parameters())),
    row("a lazily opened file, a counter, a generator and a dict", DATA, lambda: Case(
        loader=points_loader(OpensAndCounts(), shuffle=True))),
    row("arrays of objects, strings, bools and records", DATA, lambda: Case(
        loader=points_loader(Tagged(), shuffle=True))),
    row("a transform of datasets with a closure over a counter", DATA, transformed_datasets, needs=("datasets",)),
    row("values of libraries and derived classes; modules in an OrderedDict", HOOKS, lambda: Case(
        hooks=[OfLibraries()])),
]  # fmt: skip
