"""Learning-rate schedule: linear warm-up, then cosine decay."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from treadle.errors import ConfigError
from treadle.optim.schedules import check_warmup


def cosine_schedule_with_warmup(
    step: int, base_lr: float, warmup_steps: int, total_steps: int = 200_000, min_lr_ratio: float = 0.1
) -> float:
    """Return the learning rate of a step.

    With n = ``step``, W = ``warmup_steps``, S = ``total_steps`` and r = ``min_lr_ratio``: base · n/W while n < W; then
    base · (r + (1 - r)/2 · (1 + cos(pi (n - W)/(S - W)))) up to n = S; base · r afterwards. W = 0 starts at the full
    rate. If W >= S, the whole schedule is warm-up.

    Args:
        step: 0 before training, 1 for the first optimizer step.
        base_lr: learning rate at n = W.
        warmup_steps: W, at least 0.
        total_steps: S, the last step, warm-up included; at least 1.
        min_lr_ratio: r, in [0, 1]; the rate at n = S is r times the base.

    Raises:
        ConfigError: an argument is out of range.

    Example:
        >>> [cosine_schedule_with_warmup(n, 1.0, 10, 100) for n in (0, 1, 10, 55, 100)]
        [0.0, 0.1, 1.0, 0.55, 0.1]
    """
    _check(step, base_lr, warmup_steps, total_steps, min_lr_ratio)
    if step < warmup_steps:
        return base_lr * step / warmup_steps
    if step > total_steps:
        return base_lr * min_lr_ratio
    if step == warmup_steps:  # also if both are the last step, and there is no cosine
        return base_lr
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return base_lr * (min_lr_ratio + (1 - min_lr_ratio) / 2 * (1 + math.cos(math.pi * progress)))


def _check(step: int, base_lr: float, warmup_steps: int, total_steps: int, min_lr_ratio: float) -> None:
    if step < 0:
        raise ConfigError(f"={step}: must be at least 0, which is before training", argument="step")
    if not 0 <= base_lr < math.inf:
        raise ConfigError(f"={base_lr}: must be finite and at least 0", argument="base_lr")
    if warmup_steps < 0:
        raise ConfigError(
            f"={warmup_steps}: must be at least 0, which starts at the full rate", argument="warmup_steps"
        )
    if total_steps < 1:
        raise ConfigError(
            f"={total_steps}: must be at least 1; it is the last step, warm-up included", argument="total_steps"
        )
    if not 0 <= min_lr_ratio <= 1:
        raise ConfigError(f"={min_lr_ratio}: must lie in [0, 1]; it is a fraction of base_lr", argument="min_lr_ratio")


_log = logging.getLogger("treadle.astro")


class WarmupCosine(LRScheduler):
    """Warm-up and cosine scheduler; after n applied steps the rate is that of step n + 1, so no step has rate 0.

    Args:
        optimizer: the learning rates of its groups are the base rates.
        warmup_steps: steps of linear warm-up.
        total_steps: last step, warm-up included.
        min_lr_ratio: learning rate at the last step, as a fraction of the base.

    Raises:
        ConfigError: a number is out of range.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        >>> WarmupCosine(optimizer, warmup_steps=10, total_steps=100).get_last_lr()
        [0.1]
    """

    settings_of_run: ClassVar[tuple[str, ...]] = ("warmup_steps", "min_lr_ratio")
    """Entries of the state that a resumed run does not take from its checkpoint."""

    def __init__(self, optimizer: Optimizer, *, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.1):
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.min_lr_ratio = min_lr_ratio
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rates of the next step."""
        return self.rates_after(self.last_epoch)

    def rates_after(self, applied: int) -> list[float | Tensor]:
        """Return the learning rates of the step that follows a number of applied steps."""
        shape = (self.warmup_steps, self.total_steps, self.min_lr_ratio)
        factor = cosine_schedule_with_warmup(applied + 1, 1.0, *shape)
        return [base_lr * factor for base_lr in self.base_lrs]

    def use_total(self, total_steps: int) -> None:
        """Change the last step of the schedule, effective from the next step.

        Warns if steps were already applied under a different one, or if the warm-up leaves no room for the cosine.
        """
        if self.last_epoch > 0 and total_steps != self.total_steps:
            _log.warning(
                "the schedule had %d steps in all and has %d from now on: the learning rate leaves its curve after "
                "step %d; set training.total_steps to keep it", self.total_steps, total_steps, self.last_epoch,
            )  # fmt: skip
        self.total_steps = total_steps
        check_warmup(self.warmup_steps, total_steps=total_steps, min_scale=self.min_lr_ratio)  # warns
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):  # a capturable optimizer reads it from its own tensor
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the position on the curve and its last step; warm-up and minimum stay those of this run."""
        own = {name: getattr(self, name) for name in self.settings_of_run}
        for name, value in own.items():
            if name in state_dict and state_dict[name] != value:
                _log.warning(
                    "the schedule had %s=%r and has %r from now on: the learning rate leaves its curve after step %d",
                    name, state_dict[name], value, state_dict["last_epoch"],
                )  # fmt: skip
        super().load_state_dict({**state_dict, **own})
