"""Schedules of torch, alone and composed, and those of others."""

from __future__ import annotations

from typing import Any

from torch.optim import lr_scheduler as of_torch

from strangers.bench import STEPS, Case, Row

KIND = "Schedules"


class WithEpoch:
    """A schedule whose step wants the epoch, as those of timm do."""

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer

    def step(self, epoch: int, metric: Any = None) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + epoch)

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


class WithoutState:
    def __init__(self, optimizer: Any):
        self.optimizer, self.calls = optimizer, 0

    def step(self) -> None:
        self.calls += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 / self.calls


class WithState(WithoutState):
    def state_dict(self) -> Any:
        return {"calls": self.calls}

    def load_state_dict(self, state: Any) -> None:
        self.calls = state["calls"]


class Fails(of_torch.LRScheduler):
    """A mistake that shows when the rate first moves."""

    def get_lr(self) -> Any:
        return [0.1 / (2 - self.last_epoch)] if self.last_epoch < 1 else [self.missing]  # type: ignore[attr-defined]


class Warmup:
    """A callable object with state, which LambdaLR saves."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1.0 / (1 + self.calls)


def case(make: Any, interval: str = "step") -> Any:
    return lambda: Case(scheduler=make, interval=interval)


def sequential(optimizer: Any) -> Any:
    parts = [of_torch.LinearLR(optimizer, 0.1, total_iters=3), of_torch.CosineAnnealingLR(optimizer, 6)]
    return of_torch.SequentialLR(optimizer, parts, milestones=[3])


def chained(optimizer: Any) -> Any:
    return of_torch.ChainedScheduler([
        of_torch.ConstantLR(optimizer, 0.5, total_iters=4), of_torch.ExponentialLR(optimizer, 0.9),
    ])  # fmt: skip


SCHEDULERS = [
    Row("LambdaLR with a function", KIND, case(lambda of: of_torch.LambdaLR(of, lambda step: 0.9**step))),
    Row("LambdaLR with a counting object", KIND, case(lambda of: of_torch.LambdaLR(of, Warmup()))),
    Row("MultiplicativeLR", KIND, case(lambda of: of_torch.MultiplicativeLR(of, lambda step: 0.9))),
    Row("StepLR by epochs", KIND, case(lambda of: of_torch.StepLR(of, 1, 0.5), "epoch")),
    Row("MultiStepLR", KIND, case(lambda of: of_torch.MultiStepLR(of, [2, 5], 0.5))),
    Row("PolynomialLR", KIND, case(lambda of: of_torch.PolynomialLR(of, 8, 2.0))),
    Row("CosineAnnealingLR", KIND, case(lambda of: of_torch.CosineAnnealingLR(of, 8))),
    Row("CosineAnnealingWarmRestarts", KIND, case(lambda of: of_torch.CosineAnnealingWarmRestarts(of, 3, 2))),
    Row("OneCycleLR", KIND, case(lambda of: of_torch.OneCycleLR(of, 0.1, total_steps=STEPS + 1, cycle_momentum=False))),
    Row("a OneCycleLR that is too short", KIND, case(lambda of: of_torch.OneCycleLR(
        of, 0.1, total_steps=1, cycle_momentum=False)), ("OneCycleLR", "total_steps=1")),
    Row("CyclicLR", KIND, case(lambda of: of_torch.CyclicLR(of, 0.01, 0.1, 3, cycle_momentum=False))),
    Row("ReduceLROnPlateau", KIND, case(lambda of: of_torch.ReduceLROnPlateau(of, patience=0))),
    Row("SequentialLR", KIND, case(sequential)),
    Row("ChainedScheduler", KIND, case(chained)),
    Row("a SequentialLR inside a SequentialLR", KIND, case(lambda of: of_torch.SequentialLR(
        of, [sequential(of), of_torch.ExponentialLR(of, 0.8)], milestones=[5]))),
    Row("a ReduceLROnPlateau inside a SequentialLR", KIND, case(lambda of: of_torch.SequentialLR(
        of, [of_torch.ConstantLR(of, 0.5, 1), of_torch.ReduceLROnPlateau(of)], milestones=[1])),
        ("SequentialLR", "ReduceLROnPlateau")),
    Row("a schedule whose step() needs the epoch (timm)", KIND, case(WithEpoch, "epoch"), ("WithEpoch", "epoch")),
    Row("a custom schedule with state", KIND, case(WithState)),
    Row("a custom schedule without state_dict", KIND, case(WithoutState), ("WithoutState", "state_dict")),
    Row("a schedule that fails at its first step", KIND, case(Fails), ("Fails", "missing")),
]  # fmt: skip
