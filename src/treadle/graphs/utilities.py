"""Helpers for hand-written loops, and parameter counts."""

from __future__ import annotations

import logging

from torch import Tensor, nn

from treadle.errors import ConfigError
from treadle.errors.arguments import checked

_log = logging.getLogger("treadle.graphs")


class GradientAccumulator:
    """Counter of micro-batches for hand-written loops; `GraphTrainer` has ``accumulation_steps`` instead.

    Args:
        accumulation_steps: micro-batches per optimizer step, >= 1.

    Raises:
        ConfigError: ``accumulation_steps`` is below 1.

    Example:
        >>> accumulator = GradientAccumulator(2)
        >>> [accumulator.should_step() for _ in range(4)], accumulator.should_step(is_last=True)
        ([False, True, False, True], True)
    """

    @checked
    def __init__(self, accumulation_steps: int = 1):
        if not accumulation_steps >= 1:
            raise ConfigError(
                "a step needs at least 1 micro-batch", argument="accumulation_steps", value=accumulation_steps
            )
        self.accumulation_steps = accumulation_steps
        self._seen = 0

    def should_step(self, is_last: bool = False) -> bool:
        """Count one micro-batch and return whether the optimizer should step; always True after the last one."""
        self._seen += 1
        if self._seen < self.accumulation_steps and not is_last:
            return False
        self._seen = 0
        return True

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss divided by ``accumulation_steps``."""
        return loss / self.accumulation_steps

    def reset(self) -> None:
        """Reset the count."""
        self._seen = 0


@checked
def count_parameters(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters of a model; shared ones are counted once.

    Returns:
        ``{"total", "trainable", "frozen"}``.

    Example:
        >>> count_parameters(nn.Linear(2, 3))
        {'total': 9, 'trainable': 9, 'frozen': 0}
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return {"total": total, "trainable": trainable, "frozen": total - trainable}


@checked
def log_model_info(model: nn.Module) -> dict[str, int]:
    """Log the result of `count_parameters` and return it.

    Example:
        >>> log_model_info(nn.Linear(2, 3))
        {'total': 9, 'trainable': 9, 'frozen': 0}
    """
    counts = count_parameters(model)
    numbers = (f"{counts['total']:,}", f"{counts['trainable']:,}")
    _log.info("%s: %s parameters, %s of them trainable", type(model).__name__, *numbers)
    return counts
