"""Learning-rate schedule: linear warm-up, then cosine decay."""

from __future__ import annotations

import math

from treadle.errors import ConfigError


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
