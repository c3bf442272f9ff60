"""Learning-rate schedules as pure functions from a step to a factor of the base rate.

Nothing here knows an optimizer: a face binds the keyword arguments and hands the function to the scheduler
that it builds.
"""

from __future__ import annotations

import logging
import math
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from treadle.errors import ConfigError

logger = logging.getLogger("treadle.schedules")


def schedulers_in(scheduler: Any, path: str = "scheduler") -> Iterator[tuple[str, Any]]:
    """Yields a scheduler and those of torch that it composes, by path; nothing for None.

    Example:
        >>> list(schedulers_in(None))
        []
    """
    if scheduler is None:
        return
    yield path, scheduler
    for number, inner in enumerate(getattr(scheduler, "_schedulers", ())):
        yield from schedulers_in(inner, f"{path}[{number}]")


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Returns the state of a scheduler, without schedulers and functions that it wraps.

    The state dict that a class inherits from torch's holds every attribute. Those are no values; their own state is
    carried as that of any object.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        >>> scheduler.wrapped = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        >>> "wrapped" in scheduler_state(scheduler)
        False
    """
    state: dict[str, Any] = scheduler.state_dict()
    if type(scheduler).state_dict is not LRScheduler.state_dict:
        return state
    wrapped = (LRScheduler, types.FunctionType, types.MethodType, partial)
    return {key: value for key, value in state.items() if not isinstance(value, wrapped)}


def step_plateau(scheduler: ReduceLROnPlateau, value: float) -> None:
    """Steps a plateau scheduler, its relative threshold measured in the size of the best value.

    torch's own is best * (1 - threshold), which lies on the wrong side of a negative best: there a value that stays the
    same counts as better for ever. For values >= 0 both are the same.

    Example:
        >>> import torch
        >>> scheduler = ReduceLROnPlateau(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), patience=0)
        >>> for _ in range(3):
        ...     step_plateau(scheduler, -1.0)
        >>> round(scheduler.get_last_lr()[0], 6)
        0.01
    """
    mode, threshold = scheduler.threshold_mode, scheduler.threshold
    if mode == "rel" and -math.inf < scheduler.best < 0:
        scheduler.threshold_mode, scheduler.threshold = "abs", threshold * -scheduler.best
    try:
        scheduler.step(value)
    finally:
        scheduler.threshold_mode, scheduler.threshold = mode, threshold


def check_plateau(scheduler: Any, metric: str, mode: str) -> None:
    """Raises if a plateau scheduler lowers the rate while its metric improves; other schedulers pass.

    Args:
        scheduler: of the run, or None.
        metric: name of what it is stepped with.
        mode: direction of that, ``"min"`` or ``"max"``.

    Raises:
        ConfigError: its mode is the other one.

    Example:
        >>> check_plateau(None, "val_loss", "min")
    """
    if isinstance(scheduler, ReduceLROnPlateau) and scheduler.mode != mode:
        raise ConfigError(
            f"a ReduceLROnPlateau(mode={scheduler.mode!r}) is stepped with {metric!r}, which is better the "
            f"{'higher' if mode == 'max' else 'lower'} it is: it would lower the rate while training improves; build "
            f"it with mode={mode!r}",
            argument="scheduler",
        )


def warmup_cosine_factor(step: int, *, warmup_steps: int, total_steps: int, min_scale: float) -> float:
    """Linear warm-up to 1, then half a cosine down to ``min_scale``.

    With W = warm-up, S = total and a = ``min_scale``: (s + 1) / W while s < W, then
    a + (1 - a) / 2 * (1 + cos(pi * min(1, (s - W) / (S - W)))). The first update uses 1/W, the factor is 1 at
    W - 1 and at W, and a is reached at s = S, after the last update. W = 0 starts at 1. When W >= S there is
    no room for the cosine and the factor stays at 1 once the warm-up is over.

    Args:
        step: Index s of the update, 0 for the first.
        warmup_steps: W, at least 0.
        total_steps: S, all updates of the run, warm-up included.
        min_scale: a, 0 to 1.

    Returns:
        The factor, between 0 and 1.

    Example:
        >>> [warmup_cosine_factor(s, warmup_steps=2, total_steps=4, min_scale=0.2) for s in (0, 1, 2, 4)]
        [0.5, 1.0, 1.0, 0.2]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if total_steps <= warmup_steps:
        return 1.0
    progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    return min_scale + (1.0 - min_scale) / 2.0 * (1.0 + math.cos(math.pi * progress))


def check_warmup(warmup_steps: int, *, total_steps: int, min_scale: float) -> None:
    """Check the numbers of a warm-up schedule, once, where it is built.

    A warm-up at least as long as the run is legal: it warns on the logger ``treadle.schedules``.

    Raises:
        ValueError: When ``warmup_steps`` is negative, ``total_steps`` below 1 or ``min_scale`` outside 0 … 1.

    Example:
        >>> check_warmup(5, total_steps=20, min_scale=0.1)
    """
    if warmup_steps < 0:
        raise ConfigError(
            f"={warmup_steps} must be 0 or more; 0 starts at the full learning rate", argument="warmup_steps"
        )
    if total_steps < 1:
        raise ConfigError(
            f"={total_steps} must be 1 or more; pass all updates, warm-up included", argument="total_steps"
        )
    if not 0.0 <= min_scale <= 1.0:
        raise ConfigError(
            f"={min_scale} must lie between 0 and 1; it is a fraction of the base learning rate", argument="min_scale"
        )
    if warmup_steps >= total_steps:
        logger.warning(
            "warm-up of %d updates fills the whole run of %d: the learning rate never decays; "
            "shorten the warm-up or lengthen the run if that is not meant",
            warmup_steps,
            total_steps,
        )
