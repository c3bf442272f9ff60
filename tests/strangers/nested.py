"""State where no state dict looks: in hooks, closures, methods, partials, containers, caches, transforms, schedules."""

from __future__ import annotations

import functools
import queue
import random
import threading
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler as of_torch
from torch.utils import data as torch_data

from helpers import MeanSquare
from strangers.bench import ROWS, WIDTH, Case, Points, Row, net, points_loader
from strangers.models import AtStep
from strangers.objects import functional
from treadle import StepOutput
from treadle.hooks import BaseHook

HOOKS, DATA, OTHERS = "Hooks without their own state", "Data sets and collate functions", "Own objects"
SCHEDULES, LOADERS = "Schedules", "Loaders"
STOPS = (2, 5, 7)  # inside an epoch, in the next one, and after its start


# -- hooks --------------------------------------------------------------------------------------------------------


class Counts(BaseHook):
    def __init__(self) -> None:
        self.calls = 0

    def on_before_optimizer_step(self, trainer: Any) -> None:
        self.calls += 1
        for parameter in trainer.model.parameters():
            parameter.grad.mul_(1 / self.calls)


class Remembers(BaseHook):
    """Keeps a tensor that it makes late, a list and a generator."""

    def __init__(self) -> None:
        self.mean, self.history, self.chance = None, [], torch.Generator().manual_seed(4)

    def on_before_optimizer_step(self, trainer: Any) -> None:
        norm = torch.stack([one.grad.norm() for one in trainer.model.parameters()]).sum()
        self.mean = norm if self.mean is None else self.mean * 0.9 + norm * 0.1
        self.history.append(float(norm))
        for one in trainer.model.parameters():
            one.grad.div_(self.mean + len(self.history)).add_(torch.randn(one.shape, generator=self.chance))


class Follows(BaseHook):
    """Keeps a second model, as an average written by hand does."""

    def __init__(self) -> None:
        self.teacher = net().requires_grad_(False)

    def on_before_optimizer_step(self, trainer: Any) -> None:
        for slow, live in zip(self.teacher.parameters(), trainer.model.parameters(), strict=True):
            slow.lerp_(live.detach(), 0.3)
            live.grad.add_(live.detach() - slow)


class Composite(BaseHook):
    def __init__(self, *hooks: BaseHook):
        self.hooks = hooks

    def on_before_optimizer_step(self, trainer: Any) -> None:
        for hook in self.hooks:
            hook.on_before_optimizer_step(trainer)


def set_betas(trainer: Any) -> None:
    trainer.optimizer.param_groups[0]["betas"] = (0.5, 0.7)


def set_dropout(trainer: Any) -> None:
    trainer.model[2].p = 0.6


def set_clip(trainer: Any) -> None:
    trainer.grad_clip = 0.01


def set_weights(trainer: Any) -> None:
    trainer.cursor.loader.sampler.weights[:6] = 20.0


def grow(trainer: Any) -> None:
    trainer.cursor.loader.dataset.rows = ROWS


def adam(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


# -- data ---------------------------------------------------------------------------------------------------------


class Caches(Points):
    """Augments each row once and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            x, y = super().__getitem__(index)
            self.cache[index] = (x + torch.rand(1), y)
        return self.cache[index]


class Transformed(Points):
    def __init__(self, augment: Any):
        super().__init__()
        self.augment = augment

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return self.augment(x), y


class Centred(nn.Module):
    """An augmentation with buffers, one of which is not persistent, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean.lerp_(x, 0.1)
        self.count += 1
        return x - self.mean / self.calls + self.count / 100


class Compose:
    def __init__(self, *transforms: Any):
        self.transforms = list(transforms)

    def __call__(self, x: Any) -> Any:
        for transform in self.transforms:
            x = transform(x)
        return x


class Drifts:
    """A transform of a plain class."""

    def __init__(self) -> None:
        self.calls, self.chance = 0, random.Random(2)

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return x * (1 + self.chance.random() / 10) + self.calls / 100

    def collate(self, rows: Any) -> Any:
        x, y = torch_data.default_collate(rows)
        return self(x), y


class Grows(Points):
    def __init__(self) -> None:
        super().__init__()
        self.rows = 6

    def __len__(self) -> int:
        return self.rows


class GeneratorsInside(torch_data.Sampler):
    """Generators of two kinds in a dict."""

    def __init__(self) -> None:
        self.chances = {"order": torch.Generator().manual_seed(1), "shift": np.random.RandomState(3)}

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        order = torch.randperm(ROWS, generator=self.chances["order"]).tolist()
        shift = self.chances["shift"].randint(ROWS)
        return iter(order[shift:] + order[:shift])


def closing_collate() -> Any:
    calls = [0]

    def collate(rows: Any) -> Any:
        calls[0] += 1
        x, y = torch_data.default_collate(rows)
        return x + calls[0] / 10, y

    return collate


class ReadsAhead:
    """A loader with a thread. Its state is that of what it gave or, if it is careless, of what it has read."""

    def __init__(self, *, careless: bool):
        self.careless, self.epoch, self.given = careless, 0, 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        ready: Any = queue.Queue(2)
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch)).split(3)
        first, rows = self.given, Points()

        def read() -> None:
            for number in range(first, 4):
                if self.careless:
                    self.given = number + 1
                ready.put(torch_data.default_collate([rows[int(index)] for index in order[number]]))
            ready.put(None)

        threading.Thread(target=read, daemon=True).start()
        while (batch := ready.get()) is not None:
            self.given += not self.careless
            yield batch
        self.epoch, self.given = self.epoch + 1, 0

    def state_dict(self) -> Any:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: Any) -> None:
        self.epoch, self.given = state["epoch"], state["given"]


# -- schedules ----------------------------------------------------------------------------------------------------


class GradualWarmup(of_torch.LRScheduler):
    """The widely copied warm-up that wraps another schedule and inherits its state dict."""

    def __init__(self, optimizer: Any, total: int, after: Any):
        self.total, self.after, self.finished = total, after, False
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        if self.last_epoch > self.total:
            self.finished = True
            return self.after.get_last_lr()
        return [base * (1 + self.last_epoch / self.total) for base in self.base_lrs]

    def step(self, epoch: Any = None) -> None:
        if not self.finished:
            super().step()
            return
        self.after.step()
        self._last_lr = self.after.get_last_lr()


class Halves:
    """A wrapper whose state dict leaves out the schedule inside it."""

    def __init__(self, inner: Any):
        self.inner, self.calls = inner, 0

    def step(self) -> None:
        self.calls += 1
        if self.calls % 2 == 0:
            self.inner.step()

    def state_dict(self) -> Any:
        return {"calls": self.calls}

    def load_state_dict(self, state: Any) -> None:
        self.calls = state["calls"]


class Warmup:
    def __init__(self) -> None:
        self.calls = 0

    def factor(self, step: int) -> float:
        self.calls += 1
        return 1.0 / (1 + self.calls)


def closing_factor() -> Any:
    calls = 0

    def factor(step: int) -> float:
        nonlocal calls
        calls += 1
        return 1.0 / (1 + calls)

    return factor


# -- losses, tasks, models, optimizers ----------------------------------------------------------------------------


class CountingLoss:
    def __init__(self) -> None:
        self.calls = 0

    def of(self, made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (made - wanted).square().mean() / self.calls


class WithContainers(MeanSquare):
    def __init__(self) -> None:
        self.losses, self.seen, self.latest = [], set(), {}

    def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> StepOutput:
        output = super().step(model, batch)
        if model.training:
            self.losses.append(float(output.loss.detach()))
            self.seen.add(len(self.seen))
            self.latest[len(self.losses) % 3, "loss"] = self.losses[-1]
        return StepOutput(output.loss * (1 + len(self.seen) / 10 + sum(self.latest.values())), weight=output.weight)


class Memory(nn.Module):
    """A queue of tensors in a list and a memory in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.queue, self.memory = net(), [], {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.queue = [*self.queue, x.detach().mean()][-3:]
            self.memory[len(self.memory) % 5] = float(x.mean())
        return self.inner(x) + sum(self.queue) + sum(self.memory.values())


class Damps:
    """A forward hook with a counter."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return output / (1 + self.calls / 10)


def damped() -> nn.Module:
    model = net()
    model.register_forward_hook(Damps())
    return model


class OptimizerWithLists(torch.optim.SGD):
    def __init__(self, params: Any):
        super().__init__(params, lr=0.05)
        self.steps, self.most = [], {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps.append(1.0)
        self.most["steps"] = len(self.steps)
        for group in self.param_groups:
            group["lr"] = 0.05 / (len(self.steps) + self.most["steps"])
        return super().step()


def row(name: str, kind: str, make: Any, words: tuple[str, ...] = ()) -> Row:
    return Row(name, kind, make, words, stops=STOPS)


def read(data: Any = None, **settings: Any) -> Any:
    hooks = settings.pop("hooks", ())

    def case() -> Case:
        made = {name: value() if name in ("sampler", "collate_fn") else value for name, value in settings.items()}
        shuffle = {} if "sampler" in made else {"shuffle": True}
        loader = points_loader(data() if data else None, **shuffle, **made)
        return Case(loader=loader, hooks=[hook() for hook in hooks])

    return case


def scheduled(make: Any) -> Any:
    return lambda: Case(scheduler=make)


def weighted() -> Any:
    return torch_data.WeightedRandomSampler(torch.ones(ROWS, dtype=torch.float64), ROWS)


NESTED = [
    row("a counter", HOOKS, lambda: Case(hooks=[Counts()])),
    row("a tensor created later, a list and a generator", HOOKS, lambda: Case(hooks=[Remembers()])),
    row("a second model", HOOKS, lambda: Case(hooks=[Follows()])),
    row("other hooks", HOOKS, lambda: Case(hooks=[Composite(Counts(), Remembers())])),
    row("changing betas", HOOKS, lambda: Case(optimizer=adam, hooks=[AtStep(4, set_betas)])),
    row("raising the dropout rate", HOOKS, lambda: Case(hooks=[AtStep(4, set_dropout)])),
    row("setting grad_clip", HOOKS, lambda: Case(hooks=[AtStep(4, set_clip)])),
    row("changing the weights of a WeightedRandomSampler", HOOKS, read(
        sampler=weighted, hooks=[lambda: AtStep(3, set_weights)])),
    row("growing the data set", HOOKS, read(Grows, hooks=[lambda: AtStep(2, grow)])),
    row("a data set that caches augmented rows", DATA, read(Caches)),
    row("an augmentation module with buffers and a counter", DATA, read(lambda: Transformed(Centred()))),
    row("the same in a worker", DATA, read(lambda: Transformed(Centred()), num_workers=1), ("Centred", "worker")),
    row("transforms of plain classes, composed", DATA, read(lambda: Transformed(Compose(Compose(Drifts()))))),
    row("a collate function that is a method", DATA, read(collate_fn=lambda: Drifts().collate)),
    row("a collate function that is a partial", DATA, read(
        collate_fn=lambda: functools.partial(Drifts.collate, Drifts()))),
    row("a collate function with a closure over a counter", DATA, read(collate_fn=closing_collate)),
    row("a sampler with generators in a dict", "Samplers", read(sampler=GeneratorsInside)),
    row("a stateful loader that prefetches in a thread", LOADERS, lambda: Case(loader=ReadsAhead(careless=False))),
    row("the same with the state of what it has read", LOADERS, lambda: Case(loader=ReadsAhead(careless=True)),
        ("ReadsAhead", "state_dict")),
    row("a warm-up that wraps another schedule", SCHEDULES, scheduled(
        lambda of: GradualWarmup(of, 3, of_torch.CosineAnnealingLR(of, 6)))),
    row("a wrapper that omits the inner schedule", SCHEDULES, scheduled(
        lambda of: Halves(of_torch.CosineAnnealingLR(of, 6)))),
    row("LambdaLR with a method of a counting object", SCHEDULES, scheduled(
        lambda of: of_torch.LambdaLR(of, Warmup().factor))),
    row("LambdaLR with a partial of it", SCHEDULES, scheduled(
        lambda of: of_torch.LambdaLR(of, functools.partial(Warmup.factor, Warmup())))),
    row("LambdaLR with a closure over a counter", SCHEDULES, scheduled(
        lambda of: of_torch.LambdaLR(of, closing_factor()))),
    row("a loss that is a method of a counting object", OTHERS, functional(lambda: CountingLoss().of)),
    row("a list, a set and a dict on the task", OTHERS, lambda: Case(task=WithContainers())),
    row("a queue in a list and a memory in a dict", "Models", lambda: Case(model=Memory())),
    row("a counting forward hook", "Models", lambda: Case(model=damped())),
    row("a list and a dict as attributes", "Optimizers", lambda: Case(
        optimizer=lambda of: OptimizerWithLists(of.parameters()))),
]  # fmt: skip
