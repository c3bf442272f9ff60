"""Stochastic weight averaging: equal average of a model's weights, and its learning-rate schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from treadle.distributed import unwrap
from treadle.errors import ConfigError
from treadle.errors.arguments import checked, is_whole_number
from treadle.optim.ema import Ema


class Swa(Ema):
    """Equal average of a model's weights starting at an applied step; before that, the weights themselves.

    Buffers are copied from the model after every applied step.

    Args:
        model: the model to average, wrapped or not.
        start: first applied step whose weights are averaged, >= 1.
        update_interval: applied steps between updates, >= 1.
        device: device of the average; None puts it on the model's device.

    Raises:
        ConfigError: a value is outside its range.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> swa = Swa(model, start=2)
        >>> for step, value in enumerate((5.0, 1.0, 2.0), start=1):
        ...     _ = nn.init.constant_(model.weight, value); swa.update(model, applied_steps=step)
        >>> swa.module.weight.item()
        1.5
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        start: int,
        update_interval: int = 1,
        device: torch.device | str | int | None = None,
    ):
        check_start(start)
        super().__init__(model, 0.0, update_interval=update_interval, device=device)
        self.start = start

    @property
    def recordable(self) -> bool:
        """Return False: the weight of an update differs in every step."""
        return False

    @torch.no_grad()
    def update(self, model: nn.Module, *, applied_steps: int) -> None:
        """Add the model's weights to the average if ``applied_steps`` is due; before the start it copies them."""
        if applied_steps >= self.start and (applied_steps - self.start) % self.update_interval == 0:
            self.move(model, 1.0 / (self.num_updates + 1))
            self.count_update()
            return
        for shadow, live, is_buffer in self._pairs(unwrap(model)):
            if is_buffer or applied_steps < self.start:
                shadow.copy_(live)

    @torch.no_grad()
    def copy_buffers_of(self, model: nn.Module) -> None:
        """Copy the buffers of a model, such as running statistics, into the average."""
        for shadow, live, is_buffer in self._pairs(unwrap(model)):
            if is_buffer:
                shadow.copy_(live)

    def snapshot(self) -> dict[str, Any]:
        """Return the checkpoint entry: start, update_interval, num_updates, shadow."""
        return {"start": self.start, **{key: value for key, value in super().snapshot().items() if key != "decay"}}


def check_start(start: Any) -> None:
    """Raise ConfigError unless the start is an applied step, >= 1."""
    if not is_whole_number(start, 1):
        raise ConfigError("must be an applied step >= 1, such as 3/4 of the run", argument="start", value=start)


class SwaSchedule:
    """Schedule that follows another scheduler up to a step, then torch's SWALR: to a constant rate for averaging.

    Args:
        optimizer: optimizer whose learning rates are scheduled.
        start: number of steps of ``before``; the next step is the first of SWALR.
        swa_lr: learning rate of all groups, or one per group, > 0.
        anneal_steps: steps until it is reached.
        anneal_strategy: ``"cos"`` or ``"linear"``.
        before: scheduler of the same optimizer; None keeps its rates.

    Raises:
        ConfigError: a value is outside its range, or ``before`` belongs to another optimizer.

    Example:
        >>> optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        >>> schedule = SwaSchedule(optimizer, start=2, swa_lr=0.5, anneal_steps=2, anneal_strategy="linear")
        >>> rates = [(optimizer.step(), schedule.step(), schedule.get_last_lr()[0])[2] for _ in range(5)]
        >>> rates
        [1.0, 1.0, 0.75, 0.5, 0.5]
    """

    @checked
    def __init__(
        self,
        optimizer: Optimizer,
        *,
        start: int,
        swa_lr: float | list[float],
        anneal_steps: int = 10,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        before: LRScheduler | None = None,
    ):
        check_start(start)
        for rate in swa_lr if isinstance(swa_lr, list) else [swa_lr]:
            if not (isinstance(rate, (int, float)) and rate > 0):
                raise ConfigError("must be a number > 0, or a list of them", argument="swa_lr", value=swa_lr)
        if before is not None and before.optimizer is not optimizer:
            raise ConfigError("was built over another optimizer", argument="before", value=before)
        self.optimizer = optimizer
        self.start = start
        self.last_epoch = 0
        rates = [group["lr"] for group in optimizer.param_groups]
        try:
            swa = SWALR(optimizer, swa_lr, anneal_steps, anneal_strategy)  # type: ignore[arg-type]
        except ValueError as error:
            raise ConfigError(str(error), argument="anneal_steps") from error
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # without annealing SWALR sets its own rate at once
        self._schedulers: list[LRScheduler] = [*([] if before is None else [before]), swa]

    def step(self) -> None:
        """Step the current scheduler."""
        self.last_epoch += 1
        if self.last_epoch > self.start:
            self._schedulers[-1].step()
        elif len(self._schedulers) > 1:
            self._schedulers[0].step()

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of all groups."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the states of both schedulers."""
        states = [scheduler.state_dict() for scheduler in self._schedulers]
        return {"last_epoch": self.last_epoch, "_schedulers": states}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state."""
        self.last_epoch = int(state_dict["last_epoch"])
        for scheduler, state in zip(self._schedulers, state_dict["_schedulers"], strict=True):
            scheduler.load_state_dict(state)
