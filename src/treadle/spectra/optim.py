"""Optimizer and learning-rate schedule of the spectra trainer."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from treadle.errors.arguments import check_least, checked
from treadle.optim.adamw import build_optimizer, build_warmup_cosine, split_by_decay

__all__ = ["build_optimizer", "build_scheduler", "build_warmup_cosine", "split_by_decay"]


@checked
def build_scheduler(
    optimizer: Optimizer,
    *,
    steps_per_epoch: int,
    epochs: int,
    warmup_epochs: int = 1,
    min_lr_scale: float = 0.1,
) -> LambdaLR:
    """Build a warm-up and cosine schedule specified in epochs and advanced per applied step.

    Args:
        optimizer: The learning rates of its groups are the base rates.
        steps_per_epoch: Optimizer steps per epoch, at least 1. With gradient accumulation this is
            ``treadle.steps_per_epoch(loader, accumulation)``, not ``len(loader)``.
        epochs: Epochs of the whole run, at least 1.
        warmup_epochs: Warm-up epochs, at least 0, included in ``epochs``.
        min_lr_scale: Final fraction of the base rate, 0 to 1.

    Returns:
        A LambdaLR that follows `treadle.optim.schedules.warmup_cosine_factor`.

    Raises:
        ValueError: When a number is out of range.

    Example:
        >>> from torch import nn
        >>> optimizer = build_optimizer(nn.Linear(2, 3), lr=1.0)
        >>> scheduler = build_scheduler(optimizer, steps_per_epoch=5, epochs=4)
        >>> scheduler.get_last_lr()
        [0.2, 0.2]
    """
    check_least(1, steps_per_epoch=steps_per_epoch, epochs=epochs)
    check_least(0, warmup_epochs=warmup_epochs)
    return build_warmup_cosine(
        optimizer,
        warmup_steps=round(warmup_epochs * steps_per_epoch),
        total_steps=epochs * steps_per_epoch,
        min_lr_scale=min_lr_scale,
    )
