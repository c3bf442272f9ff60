"""Learning-rate schedules of the graph trainer, stepped once per epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR

from treadle.errors import ConfigError, nearest, refuse_unknown
from treadle.errors.arguments import check_least, checked
from treadle.graphs.optimizer import say_what_is_idle
from treadle.optim.schedules import check_warmup, warmup_cosine_factor

# Settings that each reads in addition to total_epochs, which belongs to the run rather than to a schedule.
_READ = {
    "cosine_warmup": ("warmup_epochs", "min_lr", "warmup_start_lr", "warmup_offset"), "cosine": ("min_lr",),
    "linear": ("min_lr",), "step": ("step_size", "gamma"),
    "warmup": ("warmup_epochs", "warmup_start_lr", "warmup_offset"), "none": (),
}  # fmt: skip
_SCHEDULERS = tuple(_READ)
_DEFAULTS = {
    "warmup_epochs": 10, "min_lr": 1e-6, "step_size": 30, "gamma": 0.1, "warmup_start_lr": 1e-7, "warmup_offset": 0,
}  # fmt: skip


@checked
def get_scheduler(
    optimizer: Optimizer,
    scheduler_type: str = "cosine_warmup",
    total_epochs: int = 100,
    warmup_epochs: int = 10,
    min_lr: float = 1e-6,
    step_size: int = 30,
    gamma: float = 0.1,
    *,
    warmup_start_lr: float = 1e-7,
    warmup_offset: int = 0,
) -> LRScheduler | None:
    """Build a schedule from the epoch index e = 0, 1, … to a learning rate, based on each group's rate b.

    With W = ``warmup_epochs``, T = ``total_epochs``, m = ``min_lr``, s = ``warmup_start_lr``, o = ``warmup_offset``:

    - ``"cosine_warmup"``: s + ((e+o)/W)(b - s) while e < W, then m + (b - m)/2 · (1 + cos(pi · min(1, (e-W)/(T-W)))).
    - ``"cosine"``: the same with W = 0.
    - ``"linear"``: from b at 0 to m at T.
    - ``"step"``: b · gamma^floor(e / step_size).
    - ``"warmup"``: the first part of cosine_warmup, then b. ``"none"``: no schedule; returns None.

    Args:
        optimizer: the learning rates of its groups are the base rates.
        scheduler_type: one of the above.
        total_epochs: T, including the warm-up, >= 1.
        warmup_epochs: W >= 0; a warm-up as long as the run is allowed with a warning.
        min_lr: m, from 0 to the base rate.
        step_size: epochs, >= 1.
        gamma: factor of ``"step"``, >= 0.
        warmup_start_lr: s >= 0.
        warmup_offset: o, 0 or 1; with 0 the first epoch has rate s, which learns nothing.

    Returns:
        A torch scheduler whose state holds only plain numbers.

    Raises:
        ConfigError: the type is unknown (the closest match is named), or a number is out of range.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1e-3)
        >>> get_scheduler(optimizer, total_epochs=10, warmup_epochs=3).get_last_lr()
        [1e-07]
    """
    if scheduler_type not in _SCHEDULERS:
        raise ConfigError(nearest(str(scheduler_type), _SCHEDULERS), argument="scheduler_type", value=scheduler_type)
    given = {
        "warmup_epochs": warmup_epochs, "min_lr": min_lr, "step_size": step_size, "gamma": gamma,
        "warmup_start_lr": warmup_start_lr, "warmup_offset": warmup_offset,
    }  # fmt: skip
    _check_numbers({"total_epochs": total_epochs, **given})
    say_what_is_idle(scheduler_type, {name: (given[name], _DEFAULTS[name]) for name in given}, _READ[scheduler_type])
    if scheduler_type == "none":
        return None
    if scheduler_type == "step":
        return StepLR(optimizer, step_size, gamma)
    warmup = 0 if scheduler_type == "cosine" else warmup_epochs
    curve = _Curve(warmup, total_epochs, start=warmup_start_lr, end=min_lr, offset=warmup_offset)
    return _follow(curve, scheduler_type, optimizer)


@checked
def get_scheduler_from_config(optimizer: Optimizer, config: Mapping[str, Any]) -> LRScheduler | None:
    """Build a schedule from the keys of a configuration.

    Args:
        optimizer: the learning rates of its groups are the base rates.
        config: ``type`` (default ``"cosine_warmup"``), ``total_epochs`` or ``epochs``, and the other arguments of
            `get_scheduler` by name.

    Raises:
        ConfigError: a key or a type is unknown, the epochs are given twice, or a number is out of range.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        >>> scheduler = get_scheduler_from_config(optimizer, {"type": "step", "step_size": 1, "gamma": 0.5})
        >>> optimizer.step(); scheduler.step(); scheduler.get_last_lr()
        [0.5]
    """
    values = dict(config)
    refuse_unknown("scheduler", values, ["type", "total_epochs", "epochs", *_DEFAULTS])
    if {"total_epochs", "epochs"} <= values.keys():
        raise ConfigError("and total_epochs both set the length of the run; give one", argument="scheduler.epochs")
    total_epochs = values.pop("total_epochs", values.pop("epochs", 100))
    return get_scheduler(optimizer, values.pop("type", "cosine_warmup"), total_epochs, **values)


@dataclass(frozen=True)
class _Curve:
    """Learning-rate factor of a base rate b by epoch; W, T, s, m and o as in `get_scheduler`."""

    warmup: int
    total: int
    start: float
    end: float
    offset: int

    def warm(self, base: float, epoch: int) -> float:
        if epoch >= self.warmup or base == 0:
            return 1.0
        return (self.start + (epoch + self.offset) / self.warmup * (base - self.start)) / base

    def cosine(self, base: float, epoch: int) -> float:
        if epoch < self.warmup or base == 0:
            return self.warm(base, epoch)
        length = self.total - self.warmup
        return warmup_cosine_factor(epoch - self.warmup, warmup_steps=0, total_steps=length, min_scale=self.end / base)

    def line(self, base: float, epoch: int) -> float:
        return 1.0 if base == 0 else 1.0 + min(1.0, epoch / self.total) * (self.end / base - 1.0)


def _follow(curve: _Curve, scheduler_type: str, optimizer: Optimizer) -> LambdaLR:
    bases = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    if scheduler_type != "warmup" and curve.end > min(bases):
        raise ConfigError(
            f"is above the learning rate {min(bases)!r}; lower it, or raise lr", argument="min_lr", value=curve.end
        )
    if scheduler_type == "cosine_warmup":
        check_warmup(curve.warmup, total_steps=curve.total, min_scale=0.0)  # warns
    factor = {"cosine_warmup": curve.cosine, "cosine": curve.cosine, "linear": curve.line, "warmup": curve.warm}
    # A partial has an empty __dict__, so LambdaLR.state_dict() stores {} for it and nothing to unpickle.
    return LambdaLR(optimizer, [partial(factor[scheduler_type], base) for base in bases])


def _check_numbers(numbers: Mapping[str, float]) -> None:
    if numbers["warmup_offset"] not in (0, 1):
        raise ConfigError("must be 0 or 1", argument="warmup_offset", value=numbers["warmup_offset"])
    for name, value in numbers.items():
        check_least(1 if name in ("total_epochs", "step_size") else 0, **{name: value})
