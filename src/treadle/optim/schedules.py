"""Learning-rate schedules: pure functions from a step to a factor of the base rate, and a scheduler builder."""

from __future__ import annotations

import logging
import math
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from treadle.errors import ConfigError, nearest
from treadle.errors.arguments import check_least, check_within, checked

logger = logging.getLogger("treadle.schedules")


def schedulers_in(scheduler: Any, path: str = "scheduler") -> Iterator[tuple[str, Any]]:
    """Yield a scheduler and the torch schedulers that it composes, by path; nothing for None.

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
    """Return the state of a scheduler, without schedulers and functions that it wraps.

    The inherited state dict of torch holds every attribute. Wrapped schedulers and functions are not values; their
    state is saved like that of any object.

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
    """Step a ReduceLROnPlateau with its relative threshold in units of the best value's magnitude.

    torch uses best * (1 - threshold), which is on the wrong side of a negative best value: there a constant value
    counts as an improvement forever. For values >= 0 both are the same.

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
    """Raise if a ReduceLROnPlateau would lower the rate while its metric improves; other schedulers pass.

    Args:
        scheduler: scheduler of the run, or None.
        metric: name of the metric it is stepped with.
        mode: direction of the metric, ``"min"`` or ``"max"``.

    Raises:
        ConfigError: its mode is the opposite.
    """
    if isinstance(scheduler, ReduceLROnPlateau) and scheduler.mode != mode:
        raise ConfigError(
            f"a ReduceLROnPlateau(mode={scheduler.mode!r}) is stepped with {metric!r}, which is better the "
            f"{'higher' if mode == 'max' else 'lower'} it is: it would lower the rate while training improves; build "
            f"it with mode={mode!r}",
            argument="scheduler",
        )


def warmup_cosine_factor(step: int, *, warmup_steps: int, total_steps: int, min_scale: float) -> float:
    """Return the factor of a linear warm-up to 1, then half a cosine down to ``min_scale``.

    With W = warm-up, S = total and a = ``min_scale``: (s + 1) / W while s < W, then a + (1 - a) / 2 * (1 + cos(pi *
    min(1, (s - W) / (S - W)))). The first update uses 1/W, the factor is 1 at W - 1 and at W, and a is reached at s =
    S, after the last update. W = 0 starts at 1. If W >= S, there is no cosine phase and the factor stays at 1 after the
    warm-up.

    Args:
        step: Index s of the update, 0 for the first.
        warmup_steps: W, at least 0.
        total_steps: S, all updates of the run, including warm-up.
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


def warmup_linear_factor(step: int, *, warmup_steps: int, total_steps: int, min_scale: float) -> float:
    """Return the factor of a linear warm-up to 1, then a linear decay to ``min_scale`` at ``total_steps``.

    Args:
        step: index of the update, 0 for the first.
        warmup_steps: updates of warm-up, >= 0.
        total_steps: all updates of the run, warm-up included.
        min_scale: final factor, 0 to 1.

    Example:
        >>> [warmup_linear_factor(s, warmup_steps=2, total_steps=4, min_scale=0.0) for s in range(5)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if total_steps <= warmup_steps:
        return 1.0
    return 1.0 - (1.0 - min_scale) * min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))


def warmup_constant_factor(step: int, *, warmup_steps: int, total_steps: int, min_scale: float) -> float:
    """Return the factor of a linear warm-up to 1, then 1; only the first two arguments are used.

    Example:
        >>> [warmup_constant_factor(s, warmup_steps=2, total_steps=9, min_scale=0.0) for s in range(4)]
        [0.5, 1.0, 1.0, 1.0]
    """
    return (step + 1) / warmup_steps if step < warmup_steps else 1.0


def warmup_stable_decay_factor(
    step: int, *, warmup_steps: int, total_steps: int, min_scale: float, decay_ratio: float = 0.2
) -> float:
    """Return the factor of warm-up, stable, decay (WSD): linear to 1, constant, then linear to ``min_scale``.

    The decay takes round(``decay_ratio`` · ``total_steps``) updates, at most those remaining after the warm-up.

    Args:
        step: index of the update, 0 for the first.
        warmup_steps: updates of warm-up, >= 0.
        total_steps: all updates of the run.
        min_scale: final factor, 0 to 1.
        decay_ratio: fraction of the run that decays, 0 to 1.

    Example:
        >>> [warmup_stable_decay_factor(s, warmup_steps=2, total_steps=10, min_scale=0.0) for s in (0, 5, 8, 9, 10)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    decay = min(round(decay_ratio * total_steps), max(0, total_steps - warmup_steps))
    start = total_steps - decay
    if step < max(warmup_steps, start) or not decay:
        return warmup_constant_factor(step, warmup_steps=warmup_steps, total_steps=total_steps, min_scale=min_scale)
    return 1.0 - (1.0 - min_scale) * min(1.0, (step - start) / decay)


def warmup_inverse_sqrt_factor(step: int, *, warmup_steps: int, total_steps: int, min_scale: float) -> float:
    """Return the factor of a linear warm-up, then sqrt(W / (step + 1)), W = max(1, ``warmup_steps``), >= ``min_scale``.

    It does not depend on ``total_steps``, so a run can be extended without a jump of the rate.

    Example:
        >>> [warmup_inverse_sqrt_factor(s, warmup_steps=2, total_steps=9, min_scale=0.0) for s in (0, 1, 7)]
        [0.5, 1.0, 0.5]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return max(min_scale, math.sqrt(max(1, warmup_steps) / (step + 1)))


SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": warmup_constant_factor,
    "cosine": warmup_cosine_factor,
    "inverse_sqrt": warmup_inverse_sqrt_factor,
    "linear": warmup_linear_factor,
    "wsd": warmup_stable_decay_factor,
}
"""The schedules by the names that settings give them."""


@dataclass(frozen=True)
class ScheduleShape:
    """Shape of a schedule by name, before the length of the run is known.

    Args:
        name: a key of :data:`SCHEDULES`.
        warmup_steps: updates of warm-up, >= 0; None if a ratio is given, else 0.
        warmup_ratio: warm-up as a fraction of the run, 0 to 1, rounded up to whole updates as transformers does.
        min_scale: final factor, 0 to 1.

    Raises:
        ConfigError: the name is unknown (the closest is suggested), a number is outside its range, or both lengths are
            given.

    Example:
        >>> ScheduleShape("cosine", warmup_ratio=0.1).factor(total_steps=20)(0)
        0.5
    """

    name: str
    warmup_steps: int | None = None
    warmup_ratio: float | None = None
    min_scale: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ConfigError(nearest(str(self.name), SCHEDULES), argument="lr_scheduler", value=self.name)
        steps, ratio = self.warmup_steps, self.warmup_ratio
        if steps is not None and ratio is not None:
            raise ConfigError("give warmup_steps or warmup_ratio, not both", argument="warmup_ratio", value=ratio)
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int)):
            raise ConfigError("must be a whole number of updates >= 0", argument="warmup_steps", value=steps)
        if ratio is not None and not (isinstance(ratio, (int, float)) and 0.0 <= ratio <= 1.0):
            raise ConfigError(
                "must lie between 0 and 1; it is a fraction of the run", argument="warmup_ratio", value=ratio
            )
        check_warmup(steps or 0, total_steps=(steps or 0) + 1, min_scale=self.min_scale)

    def factor(self, total_steps: int) -> Callable[[int], float]:
        """Return the function from the index of an update to its factor, for a run of ``total_steps`` updates.

        A partial has an empty ``__dict__``, so a LambdaLR stores nothing of it in its state: a resumed run follows the
        shape that it was built with.
        """
        steps = self.warmup_steps or 0
        if self.warmup_ratio is not None:
            steps = math.ceil(self.warmup_ratio * total_steps)
        return partial(
            SCHEDULES[self.name], warmup_steps=steps, total_steps=total_steps, min_scale=float(self.min_scale)
        )


@checked
def build_schedule(
    optimizer: Optimizer,
    name: str = "cosine",
    *,
    total_steps: int,
    warmup_steps: int | None = None,
    warmup_ratio: float | None = None,
    min_scale: float = 0.0,
) -> LambdaLR:
    """Build a schedule with a linear warm-up, stepped per applied step.

    Args:
        optimizer: optimizer whose learning rates are the base rates.
        name: ``"cosine"``, ``"linear"``, ``"wsd"`` (warm-up, stable, decay), ``"inverse_sqrt"`` or ``"constant"``.
        total_steps: all updates of the run, including warm-up, >= 1.
        warmup_steps: updates of warm-up, >= 0.
        warmup_ratio: warm-up as a fraction of the run, 0 to 1, in place of ``warmup_steps``.
        min_scale: final factor of the rate, 0 to 1.

    Returns:
        A LambdaLR, whose state holds plain numbers only.

    Raises:
        ConfigError: the name is unknown, or a number is outside its range.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        >>> build_schedule(optimizer, "linear", total_steps=20, warmup_steps=4).get_last_lr()
        [0.25]
    """
    shape = ScheduleShape(name, warmup_steps, warmup_ratio, min_scale)
    factor = shape.factor(total_steps)
    check_warmup(warmup_steps or 0, total_steps=total_steps, min_scale=min_scale)
    return LambdaLR(optimizer, factor)


def follow_shape(scheduler: LambdaLR, shape: ScheduleShape, total_steps: int) -> None:
    """Set the length of a scheduler's shape; before its first step, update the learning rates too.

    Args:
        scheduler: scheduler from :func:`build_schedule`, of any length.
        shape: its shape.
        total_steps: all updates of the run, >= 1.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        >>> scheduler = build_schedule(optimizer, "cosine", total_steps=1, warmup_ratio=0.1)
        >>> follow_shape(scheduler, ScheduleShape("cosine", warmup_ratio=0.1), 40)
        >>> optimizer.param_groups[0]["lr"]
        0.25
    """
    check_warmup(shape.warmup_steps or 0, total_steps=total_steps, min_scale=shape.min_scale)
    scheduler.lr_lambdas = [shape.factor(total_steps)] * len(scheduler.lr_lambdas)
    if scheduler.last_epoch:
        return
    rates = [base * factor(0) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    scheduler._last_lr = rates


def check_warmup(warmup_steps: int, *, total_steps: int, min_scale: float) -> None:
    """Check the numbers of a warm-up schedule when it is built.

    A warm-up at least as long as the run is allowed, with a warning on the logger ``treadle.schedules``.

    Raises:
        ValueError: ``warmup_steps`` is negative, ``total_steps`` below 1 or ``min_scale`` outside 0 … 1.
    """
    check_least(0, warmup_steps=warmup_steps)
    check_least(1, total_steps=total_steps)
    check_within("[0, 1]", min_scale=min_scale)
    if warmup_steps >= total_steps:
        logger.warning(
            "warm-up of %d updates fills the whole run of %d: the learning rate never decays; "
            "shorten the warm-up or lengthen the run if that is not intended",
            warmup_steps,
            total_steps,
        )
