"""What hooks make before training, graphs that are left behind, and what a script keeps outside of its objects."""

from __future__ import annotations

import configparser
import ctypes
import os
from typing import Any

import torch
import torchmetrics
from torch import nn
from torch.utils.data import WeightedRandomSampler

from helpers import MeanSquare
from strangers.bench import WIDTH, Case, Row, net, points_loader
from strangers.kept import Scaled, divide
from treadle import StepOutput
from treadle.hooks import BaseHook

HOOKS, OWN, MODELS, SAMPLERS, VARIABLES = (
    "Hooks without state of their own", "Own objects", "Models", "Samplers", "Variables that no object holds",
)  # fmt: skip
STOPS = (1, 2, 4, 7)


# -- hooks that begin -----------------------------------------------------------------------------------------------


class MakesItLate(BaseHook):
    """An average by hand, a counter and a list, all made when training begins."""

    def on_before_train(self, trainer: Any) -> None:
        self.shadow = {name: one.detach().clone() for name, one in trainer.model.named_parameters()}
        self.count, self.sizes, self.width = 0, [], WIDTH

    def on_before_optimizer_step(self, trainer: Any) -> None:
        self.count += 1
        self.sizes.append(len(trainer.group.batches[0][0]))
        for name, one in trainer.model.named_parameters():
            self.shadow[name].lerp_(one.detach(), 0.5)
            one.grad.add_(one.detach() - self.shadow[name], alpha=0.1 * (self.count + sum(self.sizes)))


class Warmup:
    """A schedule that is a plain object with the optimizer in it."""

    def __init__(self, optimizer: Any):
        self.optimizer, self.moves = optimizer, 0

    def step(self) -> None:
        self.moves += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 / self.moves


class WarmsUp(BaseHook):
    def on_before_train(self, trainer: Any) -> None:
        self.schedule = Warmup(trainer.optimizer)

    def on_before_optimizer_step(self, trainer: Any) -> None:
        self.schedule.step()


class BeginsAgain(BaseHook):
    """Resets a metric, a teacher and a number that it has from the start."""

    def __init__(self) -> None:
        self.metric, self.teacher, self.best = torchmetrics.MeanMetric(), net(), 9.0

    def on_before_train(self, trainer: Any) -> None:
        self.metric.reset()
        self.best = 9.0
        self.teacher.load_state_dict(trainer.model.state_dict())

    def on_before_optimizer_step(self, trainer: Any) -> None:
        self.metric.update(trainer.step)
        self.best = min(self.best, 1 / trainer.step)
        for one, other in zip(trainer.model.parameters(), self.teacher.parameters(), strict=True):
            other.data.lerp_(one.detach(), 0.3)
            one.grad.add_(one.detach() - other.detach())
        divide(trainer, float(self.metric.compute()) + self.best)


class BeginsTheModel(BaseHook):
    """Freezes, initializes, registers and sets when training begins, and moves all of it later."""

    def on_before_train(self, trainer: Any) -> None:
        trainer.model[0].requires_grad_(False)
        nn.init.orthogonal_(trainer.model[3].weight)
        trainer.model.register_buffer("mask", torch.ones(6, WIDTH), persistent=False)
        trainer.model[2].p, trainer.grad_clip = 0.0, 1.0
        trainer.optimizer.param_groups[0].update(lr=0.02, momentum=0.5)

    def on_before_optimizer_step(self, trainer: Any) -> None:
        if trainer.model[0].weight.grad is not None:
            trainer.model[0].weight.grad.mul_(trainer.model.mask)

    def on_after_step(self, trainer: Any) -> None:
        if trainer.step == 3:
            trainer.model[0].requires_grad_(True)
        trainer.model.mask.mul_(0.9)
        trainer.model[2].p += 0.05
        trainer.grad_clip *= 0.8
        trainer.optimizer.param_groups[0]["lr"] *= 1.1


# -- graphs that are left behind ------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Keeps its state with its graph, and cuts the graph when it reads it."""

    def __init__(self, begins: Any):
        super().__init__()
        self.cell, self.out, self.hidden = nn.GRUCell(WIDTH, 5), nn.Linear(5, 1), begins

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = None if self.hidden is None else self.hidden.detach()
        self.hidden = self.cell(x, before)
        return self.out(self.hidden)


class LongMemory(nn.Module):
    """An LSTM whose state goes from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out, self.hidden = nn.LSTM(WIDTH, 5, batch_first=True), nn.Linear(5, 1), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, hidden = self.lstm(x[:, None], self.hidden)
        self.hidden = tuple(part.detach() for part in hidden)
        return self.out(found[:, -1])


class RemembersLosses(MeanSquare):
    """Divides by its last losses, which it keeps as they are."""

    def __init__(self) -> None:
        self.losses: list[Any] = []

    def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> StepOutput:
        output = super().step(model, batch)
        self.losses = [*self.losses[-2:], output.loss]
        return StepOutput(output.loss / (1 + sum(float(loss) for loss in self.losses)), weight=output.weight)


# -- outside of objects ---------------------------------------------------------------------------------------------

WEIGHTS = torch.ones(12, dtype=torch.float64)
SETTINGS, CELLS = configparser.ConfigParser(), (ctypes.c_double * 2)()


class Hardest(Scaled):
    """Draws more often what it was wrong about, by weights that a variable and the sampler share."""

    def next(self, batch: Any) -> Any:
        index = (batch[0][:, 0] * 10).round().long()
        WEIGHTS[index] = WEIGHTS[index] + index + 1.0
        return 0


def with_shared_weights() -> Case:
    WEIGHTS.fill_(1.0)
    return Case(task=Hardest(), loader=points_loader(sampler=WeightedRandomSampler(WEIGHTS, 12)))


class Outside(Scaled):
    """Counts in a variable of the environment, in a ConfigParser and in an array of ctypes."""

    def next(self, batch: Any) -> Any:
        os.environ["STRANGERS_COUNT"] = str(int(os.environ.get("STRANGERS_COUNT", "0")) + 1)
        SETTINGS["loss"]["scale"] = str(SETTINGS.getfloat("loss", "scale") * 1.5)
        CELLS[1] += 0.5
        return int(os.environ["STRANGERS_COUNT"]) + SETTINGS.getfloat("loss", "scale") + CELLS[1]


def outside() -> Case:
    os.environ["STRANGERS_COUNT"] = "0"
    SETTINGS.read_dict({"loss": {"scale": "1.0"}})
    CELLS[1] = 0.0
    return Case(task=Outside())


BEGUN = [
    Row("an average, a counter and a list that it makes when training begins", HOOKS,
        lambda: Case(hooks=[MakesItLate()]), stops=STOPS),
    Row("a schedule with the optimizer in it that it makes when training begins", HOOKS,
        lambda: Case(hooks=[WarmsUp()]), stops=STOPS),
    Row("a metric, a teacher and a number that it resets when training begins", HOOKS,
        lambda: Case(hooks=[BeginsAgain()]), stops=STOPS),
    Row("weights, a frozen layer, a buffer, clipping and settings that it sets when training begins", HOOKS,
        lambda: Case(hooks=[BeginsTheModel()]), stops=STOPS),
    Row("a recurrent state with its graph", MODELS, lambda: Case(model=Recurrent(None)), stops=STOPS),
    Row("a recurrent state with its graph, there from the start", MODELS,
        lambda: Case(model=Recurrent(torch.zeros(3, 5))), stops=STOPS),
    Row("an LSTM whose state goes from batch to batch", MODELS, lambda: Case(model=LongMemory()), stops=STOPS),
    Row("losses in a list, with their graphs", OWN, lambda: Case(task=RemembersLosses()), stops=STOPS),
    Row("weights of a WeightedRandomSampler that a variable shares, moved by the task", SAMPLERS, with_shared_weights,
        stops=STOPS),
    Row("os.environ, a ConfigParser and an array of ctypes", VARIABLES, outside, stops=STOPS),
]  # fmt: skip
