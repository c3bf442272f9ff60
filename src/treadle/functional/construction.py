"""Construction of a trainer's optimizer, schedule and loss from its arguments and settings."""

from __future__ import annotations

import logging
import math
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from treadle.data.amount import batches_in
from treadle.engine.limits import Limits
from treadle.errors import ConfigError
from treadle.functional.settings import TrainingSettings
from treadle.optim.optimizer import can_be_fused, decay_groups, move_optimizer_state
from treadle.optim.schedules import follow_shape

_log = logging.getLogger("treadle.functional")


def in_argument_order(optimizer: Any, loss_fn: Any) -> tuple[Any, Any]:
    """Return ``(optimizer, loss_fn)``, swapped if given in the order of ``qurious.llms.trainer``.

    Example:
        >>> in_argument_order(nn.MSELoss(), None)
        (None, MSELoss())
    """
    is_loss = isinstance(optimizer, (nn.Module, types.FunctionType)) and not isinstance(optimizer, Optimizer)
    if is_loss and (loss_fn is None or isinstance(loss_fn, Optimizer)):
        return loss_fn, optimizer
    return optimizer, loss_fn


def optimizer_for(model: nn.Module, optimizer: Optimizer | None, *, settings: TrainingSettings) -> Optimizer:
    """Return the given optimizer, its state moved to the parameters' devices, or an AdamW of the trainable parameters.

    The AdamW is fused if possible, and applies weight decay to matrices only, not to biases and normalisation layers.

    A setting that differs from a given optimizer's causes a warning; the optimizer is not changed.

    Raises:
        ConfigError: it is not an optimizer.

    Example:
        >>> optimizer_for(nn.Linear(1, 1), None, settings=TrainingSettings()).param_groups[0]["lr"]
        0.0001
    """
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ConfigError(
            "must be a torch optimizer over the model's parameters, such as AdamW(model.parameters(), lr=1e-3), or "
            "None to build one from the config",
            argument="optimizer",
            value=optimizer,
        )
    if optimizer is None:
        lr = 1e-4 if settings.learning_rate is None else settings.learning_rate
        decay = 0.01 if settings.weight_decay is None else settings.weight_decay
        groups = decay_groups(model, decay)
        fused = can_be_fused(parameter for group in groups for parameter in group["params"]) or None
        return torch.optim.AdamW(groups, lr=lr, weight_decay=decay, fused=fused)
    move_optimizer_state(optimizer)
    for name, key in (("learning_rate", "lr"), ("weight_decay", "weight_decay")):
        wanted = getattr(settings, name)
        # A scheduler has already changed the learning rate; compare the initial rate.
        held = [group.get(f"initial_{key}", group.get(key, 0.0)) for group in optimizer.param_groups]
        own = {float(value) for value in held if value is not None}  # None where the optimizer computes the rate
        if wanted is not None and wanted not in own:
            _log.warning(
                "config.training.%s=%s has no effect: the given optimizer keeps its %s; pass optimizer=None to build "
                "one from the config",
                name, wanted, ", ".join(f"{value:g}" for value in sorted(own)),
            )  # fmt: skip
    return optimizer


def warn_of_idle_interval(scheduler: Any, settings: TrainingSettings) -> None:
    """Warn about a scheduler interval setting without effect.

    Example:
        >>> warn_of_idle_interval(None, TrainingSettings())
    """
    plateau = isinstance(scheduler, ReduceLROnPlateau)
    if settings.scheduler_step_per_batch and (scheduler is None or plateau):
        _log.warning(
            "config.training.scheduler_step_per_batch=True has no effect: %s",
            "a ReduceLROnPlateau steps with each new value of the best metric" if plateau else "there is no scheduler",
        )


def scheduler_for(optimizer: Optimizer, scheduler: Any, settings: TrainingSettings) -> Any:
    """Return the given scheduler, or the one named in the settings, whose length is set when training starts.

    Raises:
        ConfigError: both are given.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        >>> scheduler_for(optimizer, None, TrainingSettings(lr_scheduler="linear", warmup_steps=4)).get_last_lr()
        [0.25]
    """
    if settings.schedule is None:
        return scheduler
    if scheduler is not None:
        raise ConfigError(
            f"a {type(scheduler).__name__} is also given as scheduler=; keep one of the two",
            argument="lr_scheduler",
            value=settings.lr_scheduler,
        )
    return LambdaLR(optimizer, settings.schedule.factor(total_steps=1))


def set_length(scheduler: Any, loader: Iterable[Any], num_epochs: int, *, settings: TrainingSettings) -> None:
    """Set the length of a schedule named in the settings: the steps of all epochs, subject to limits.

    Args:
        scheduler: scheduler from :func:`scheduler_for`.
        loader: loader of the micro-batches of an epoch.
        num_epochs: epochs of the whole run.
        settings: settings with the schedule, the accumulation steps and the limits.

    Raises:
        ConfigError: the loader has no length.

    Example:
        >>> set_length(None, [], 1, settings=TrainingSettings())
    """
    limits = Limits.among(vars(settings))
    epochs = limits.target(None, num_epochs)[1]
    if settings.schedule is None or not epochs:
        return
    try:
        batches = len(loader)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(
            "the loader has no length, so the number of steps is unknown; pass "
            "scheduler=treadle.build_schedule(optimizer, name, total_steps=...) and scheduler_step_per_batch=True",
            argument="lr_scheduler",
            value=settings.lr_scheduler,
        ) from None
    for name, amount in (("limit_train_batches", limits.train), ("overfit_batches", limits.overfit_batches)):
        if amount is not None and batches:
            batches = min(batches, batches_in(amount, batches, name))
    if steps := epochs * math.ceil(batches / settings.gradient_accumulation_steps):
        follow_shape(scheduler, settings.schedule, steps)


def check_loss_fn(loss_fn: Any, *, own_loss: bool) -> None:
    """Raise ConfigError for a loss that is a class or not a scalar.

    Args:
        loss_fn: the loss, or None.
        own_loss: whether a subclass computes the loss itself, and so may reduce it.
    """
    if (isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module)) or not (loss_fn is None or callable(loss_fn)):
        raise ConfigError(
            "must be a function of (outputs, targets), such as nn.MSELoss() (an instance, not the class), or None if "
            "the model returns its loss",
            argument="loss_fn",
            value=loss_fn,
        )
    if getattr(loss_fn, "reduction", None) == "none" and not own_loss:
        raise ConfigError(
            "reduction='none' does not yield a scalar to train on; use 'mean' or 'sum', or override _compute_loss to "
            "reduce it",
            argument="loss_fn",
            value=loss_fn,
        )
