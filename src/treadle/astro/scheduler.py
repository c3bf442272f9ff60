"""Learning-rate scheduler of a run: `cosine_schedule_with_warmup`, advanced by applied steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from treadle.astro.schedule import cosine_schedule_with_warmup
from treadle.optim.schedules import check_warmup

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

    def __init__(self, optimizer: Optimizer, *, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.1):
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.min_lr_ratio = min_lr_ratio
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rates of the next step."""
        shape = (self.warmup_steps, self.total_steps, self.min_lr_ratio)
        factor = cosine_schedule_with_warmup(self.last_epoch + 1, 1.0, *shape)
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
        own = {"warmup_steps": self.warmup_steps, "min_lr_ratio": self.min_lr_ratio}
        super().load_state_dict({**state_dict, **own})
