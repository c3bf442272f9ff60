"""Objects of users on the trainer and the task: losses, metrics, teachers, augmentations, helpers and counters."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from helpers import MeanSquare
from strangers.bench import WIDTH, Case, Row, net, points_loader
from treadle import BaseTrainer, StepOutput, Trainer
from treadle.hooks import BaseHook

KIND = "Own objects"


class Centers(nn.Module):
    """A loss with centres in a buffer, which it moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centers", torch.zeros(1))

    def forward(self, made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.centers.lerp_(wanted.mean(), 0.2)
        return (made - wanted - self.centers).square().mean()


class Scaled(nn.Module):
    """A loss with a parameter that the optimizer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(1))

    def forward(self, made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (made - wanted).square().mean() * (-self.log_scale).exp().sum() + self.log_scale.sum()


class Running:
    """A metric that accumulates, with the two methods."""

    def __init__(self) -> None:
        self.total, self.count = torch.zeros(()), 0

    def update(self, value: torch.Tensor) -> torch.Tensor:
        self.total, self.count = self.total + value.detach(), self.count + 1
        return self.total / self.count

    def state_dict(self) -> Any:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.total, self.count = state["total"].clone(), state["count"]


class Unplain(Running):
    def state_dict(self) -> Any:
        return {"handle": object()}


class Rich(Running):
    """A state dict of values as users have them, whose types count."""

    def __init__(self) -> None:
        super().__init__()
        self.chance, self.seen, self.at = random.Random(2), deque(maxlen=3), {("a", 1): Path("here")}

    def update(self, value: Any) -> Any:
        self.seen.append(self.chance.random())
        self.at["a", 1] /= "below"
        return super().update(value) * sum(self.seen) * len(self.at["a", 1].parts)

    def state_dict(self) -> Any:
        held = {"chance": self.chance.getstate(), "numpy": np.arange(3), "seen": self.seen, "at": self.at}
        return {**super().state_dict(), **held}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.chance.setstate(state["chance"])
        self.seen, self.at = state["seen"], state["at"]
        assert (state["numpy"] == np.arange(3)).all()


class With(MeanSquare):
    """A task that uses one more object."""

    def __init__(self, **parts: Any):
        vars(self).update(parts)


class WithRunning(With):
    def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> StepOutput:
        output = super().step(model, batch)
        return StepOutput(output.loss * self.running.update(output.loss), weight=output.weight)


class WithHelper(With):
    def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> StepOutput:
        output = super().step(model, batch)
        return StepOutput(output.loss * self.helper.inner.update(output.loss), weight=output.weight)


class Helper:
    """A plain object that holds another with state."""

    def __init__(self) -> None:
        self.inner = Running()


class Annealed(MeanSquare):
    """A task with a factor that it lowers itself."""

    def __init__(self) -> None:
        self.factor = 1.0

    def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> StepOutput:
        output = super().step(model, batch)
        if model.training:
            self.factor *= 0.9
        return StepOutput(output.loss * self.factor, weight=output.weight)


class Distilled(BaseTrainer):
    """A student of a teacher that is never trained, a second one that follows the student, and a counter."""

    def build_data_loader(self) -> Any:
        return points_loader(shuffle=True)

    def build_model(self) -> nn.Module:
        self.teacher = nn.Linear(WIDTH, 1).requires_grad_(False)
        self.follower = nn.Linear(WIDTH, 1).requires_grad_(False)
        self.temperature = 2.0
        return nn.Linear(WIDTH, 1)

    def build_optimizer(self) -> Any:
        return torch.optim.Adam(self.model.parameters(), lr=0.01)

    def forward(self, input: Any) -> Any:
        made = self.model(input[0])
        with torch.no_grad():
            for slow, live in zip(self.follower.parameters(), self.model.parameters(), strict=True):
                slow.lerp_(live, 0.1)
        self.temperature *= 0.95
        wanted = (self.teacher(input[0]) + self.follower(input[0])) / self.temperature
        return (made - wanted).square().mean(), {}


class CountingHook(BaseHook):
    """A hook with state under its key, which scales the gradients."""

    def __init__(self) -> None:
        self.calls = 0

    def on_before_optimizer_step(self, trainer: Any) -> None:
        self.calls += 1
        for parameter in trainer.model.parameters():
            parameter.grad.mul_(1 / self.calls)

    def on_state_dict(self, trainer: Any, state_dict: Any) -> None:
        state_dict["hooks"][self.state_key] = {"calls": self.calls}

    def on_load_state_dict(self, trainer: Any, state_dict: Any) -> None:
        self.calls = state_dict["hooks"][self.state_key]["calls"]


class WritesInto(BaseHook):
    writes = True

    def __init__(self, path: Path):
        self.path = path


class Masked(nn.Module):
    """An augmentation with a generator and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.chance = torch.Generator().manual_seed(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (torch.rand(x.shape, generator=self.chance) > 0.2) / self.calls**0.1


class Augmented(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.augment, self.inner = Masked(), net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.augment(x) if self.training else x)


def functional(loss: Any, *, trained: bool = False, metrics: Any = None) -> Any:
    def case() -> Case:
        model, made = net(), loss()
        parameters = [*model.parameters(), *(made.parameters() if trained else ())]
        trainer = Trainer(model, torch.optim.AdamW(parameters, lr=0.02), made, device="cpu",
                          metrics=metrics() if metrics else None)  # fmt: skip
        return Case(engine=trainer._engine)

    return case


def mean_metric() -> Any:
    import torchmetrics

    return {"error": torchmetrics.MeanSquaredError()}


OBJECTS = [
    Row("a loss module that updates a buffer", KIND, functional(Centers)),
    Row("a loss module with a parameter in the optimizer", KIND, functional(Scaled, trained=True)),
    Row("a loss module with constant weights", KIND, functional(lambda: nn.HuberLoss(delta=0.5))),
    Row("torchmetrics on a trainer", KIND, functional(nn.MSELoss, metrics=mean_metric), needs=("torchmetrics",)),
    Row("a metric with state on the task", KIND, lambda: Case(task=WithRunning(running=Running()))),
    Row("an object with state inside a plain object", KIND, lambda: Case(task=WithHelper(helper=Helper()))),
    Row("a factor lowered by the task", KIND, lambda: Case(task=Annealed())),
    Row("a state_dict with a deque, a Path and tuple keys", KIND, lambda: Case(
        task=WithRunning(running=Rich()))),
    Row("a state_dict with an object() in it", KIND, lambda: Case(task=WithRunning(running=Unplain())),
        ("task.running.handle", "object")),
    Row("a frozen teacher, a follower and a temperature", KIND, lambda: Case(
        engine=Distilled(max_steps=9, device="cpu"))),
    Row("a hook with state", KIND, lambda: Case(hooks=[CountingHook()])),
    Row("a hook whose folder is a file", KIND, lambda: Case(hooks=[WritesInto(Path(__file__) / "below")]),
        ("WritesInto", "objects.py")),
    Row("an augmentation with a generator and a counter", KIND, lambda: Case(model=Augmented())),
]  # fmt: skip
