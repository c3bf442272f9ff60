"""The learning-rate schedules of the graph face, stepped once an epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR

from treadle.errors import ConfigError, nearest
from treadle.schedules import check_warmup, warmup_cosine_factor

_SCHEDULERS = ("cosine_warmup", "cosine", "linear", "step", "warmup", "none")


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
) -> LRScheduler | None:
    """Builds a schedule from the epoch index e = 0, 1, … to a learning rate, with the group's own rate b as its base.

    With W = ``warmup_epochs``, T = ``total_epochs``, m = ``min_lr``, s = ``warmup_start_lr``:

    - ``"cosine_warmup"``: s + (e/W)(b - s) while e < W, then m + (b - m)/2 · (1 + cos(pi · min(1, (e - W)/(T - W)))).
    - ``"cosine"``: the same with W = 0.
    - ``"linear"``: from b at 0 to m at T.
    - ``"step"``: b · gamma^floor(e / step_size).
    - ``"warmup"``: the first part of cosine_warmup, then b.
    - ``"none"``: no schedule; returns None.

    Args:
        optimizer: its groups' learning rates are the base rates.
        scheduler_type: one of the above.
        total_epochs: T, the warm-up included, >= 1.
        warmup_epochs: W >= 0; a warm-up that fills the run is legal and warns.
        min_lr: m, from 0 to the base rate.
        step_size: epochs, >= 1.
        gamma: factor of ``"step"``, >= 0.
        warmup_start_lr: s >= 0.

    Returns:
        One of torch's schedulers, whose state holds plain numbers only.

    Raises:
        ConfigError: the type is unknown (the nearest is named), or a number is out of range.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1e-3)
        >>> get_scheduler(optimizer, total_epochs=10, warmup_epochs=3).get_last_lr()
        [1e-07]
    """
    if scheduler_type not in _SCHEDULERS:
        raise ConfigError(f"scheduler_type={scheduler_type!r} is unknown; {nearest(str(scheduler_type), _SCHEDULERS)}")
    _check_numbers({
        "total_epochs": (total_epochs, 1), "warmup_epochs": (warmup_epochs, 0), "min_lr": (min_lr, 0),
        "step_size": (step_size, 1), "gamma": (gamma, 0), "warmup_start_lr": (warmup_start_lr, 0),
    })  # fmt: skip
    if scheduler_type == "none":
        return None
    if scheduler_type == "step":
        return StepLR(optimizer, step_size, gamma)
    bases = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    if scheduler_type != "warmup" and min_lr > min(bases):
        raise ConfigError(f"min_lr={min_lr!r}: lies above the learning rate {min(bases)!r}; lower it, or raise lr")
    if scheduler_type == "cosine_warmup":
        check_warmup(warmup_epochs, total_steps=total_epochs, min_scale=0.0)  # warns
    shape = {"cosine_warmup": _cosine, "cosine": _cosine, "linear": _linear, "warmup": _warmup}[scheduler_type]
    warmup_epochs = 0 if scheduler_type == "cosine" else warmup_epochs
    # A partial has an empty __dict__, so LambdaLR.state_dict() stores {} for it and nothing to unpickle.
    factors: list[Callable[[int], float]] = [
        partial(shape, base=b, warmup=warmup_epochs, total=total_epochs, start=warmup_start_lr, end=min_lr)
        for b in bases
    ]
    return LambdaLR(optimizer, factors)


def _check_numbers(numbers: Mapping[str, tuple[float, float]]) -> None:
    for name, (value, least) in numbers.items():
        if not value >= least:
            raise ConfigError(f"{name}={value!r}: must be >= {least}")


def _warmup(epoch: int, *, base: float, warmup: int, total: int, start: float, end: float) -> float:
    """Returns the factor of the base rate in an epoch that may belong to the warm-up; 1 afterwards."""
    if epoch >= warmup or base == 0:
        return 1.0
    return (start + epoch / warmup * (base - start)) / base


def _cosine(epoch: int, *, base: float, warmup: int, total: int, start: float, end: float) -> float:
    if epoch < warmup or base == 0:
        return _warmup(epoch, base=base, warmup=warmup, total=total, start=start, end=end)
    return warmup_cosine_factor(epoch - warmup, warmup_steps=0, total_steps=total - warmup, min_scale=end / base)


def _linear(epoch: int, *, base: float, warmup: int, total: int, start: float, end: float) -> float:
    return 1.0 if base == 0 else 1.0 + min(1.0, epoch / total) * (end / base - 1.0)
