"""What is refused or warned about before any work is lost, and what is built in its place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence, Sized
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from treadle.engine.best import BestRule, Mode
from treadle.errors import ConfigError
from treadle.functional.driver import PREFIX, FaceEpochs, MetricRule
from treadle.functional.settings import TrainingSettings
from treadle.optim.optimizer import can_be_fused, move_optimizer_state

_log = logging.getLogger("treadle.functional")
# What `train` calls the arguments of a best rule.
_OURS = {"mode": "best_mode", "patience": "early_stopping_patience"}


def optimizer_for(model: nn.Module, optimizer: Optimizer | None, *, settings: TrainingSettings) -> Optimizer:
    """Returns the optimizer as given, its state beside the parameters, or an AdamW over the model, fused if it can be.

    A setting that differs from a given optimizer's is warned about; the optimizer stays as it is.

    Raises:
        ConfigError: it is no optimizer.

    Example:
        >>> optimizer_for(nn.Linear(1, 1), None, settings=TrainingSettings()).param_groups[0]["lr"]
        0.0001
    """
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ConfigError(
            "must be an optimizer of torch, made for the model, such as "
            "AdamW(model.parameters(), lr=1e-3), or None for one made from the config",
            argument="optimizer",
            value=optimizer,
        )
    if optimizer is None:
        lr = 1e-4 if settings.learning_rate is None else settings.learning_rate
        decay = 0.01 if settings.weight_decay is None else settings.weight_decay
        fused = can_be_fused(model.parameters()) or None
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay, fused=fused)
    move_optimizer_state(optimizer)
    for name, key in (("learning_rate", "lr"), ("weight_decay", "weight_decay")):
        wanted = getattr(settings, name)
        # A scheduler has moved the learning rate already; what it started from is what was asked for.
        own = {float(group.get(f"initial_{key}", group.get(key, 0.0))) for group in optimizer.param_groups}
        if wanted is not None and wanted not in own:
            _log.warning(
                "config.training.%s=%s: the given optimizer has %s and keeps it; pass optimizer=None to have one built "
                "from the config",
                name, wanted, ", ".join(f"{value:g}" for value in sorted(own)),
            )  # fmt: skip
    return optimizer


def warn_of_idle_interval(scheduler: Any, settings: TrainingSettings) -> None:
    """Warns of a setting that says when the scheduler moves where nothing moves so.

    Example:
        >>> warn_of_idle_interval(None, TrainingSettings())
    """
    plateau = isinstance(scheduler, ReduceLROnPlateau)
    if settings.scheduler_step_per_batch and (scheduler is None or plateau):
        _log.warning(
            "config.training.scheduler_step_per_batch=True: %s",
            "a ReduceLROnPlateau moves with each new value of the best metric" if plateau else "there is no scheduler",
        )


def check_loss_fn(loss_fn: Any, *, own_loss: bool) -> None:
    """Raises ConfigError for a loss that is not a scalar or a class, and warns of one with parameters of its own.

    Args:
        loss_fn: the loss, or None.
        own_loss: whether a subclass computes the loss itself, and so may reduce it.
    """
    if (isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module)) or not (loss_fn is None or callable(loss_fn)):
        raise ConfigError(
            "must be a function of (outputs, targets), such as nn.MSELoss() with its brackets, "
            "or None where the model returns its loss",
            argument="loss_fn",
            value=loss_fn,
        )
    if getattr(loss_fn, "reduction", None) == "none" and not own_loss:
        raise ConfigError(
            "reduction='none' gives no scalar to train on; use 'mean' or 'sum', or override "
            "_compute_loss and reduce it there",
            argument="loss_fn",
            value=loss_fn,
        )
    if isinstance(loss_fn, nn.Module) and any(parameter.requires_grad for parameter in loss_fn.parameters()):
        _log.warning(
            "loss_fn: %s has parameters that require gradients; a checkpoint holds those of the model only, so they "
            "start fresh on a resume: make the loss a part of the model",
            type(loss_fn).__name__,
        )


def check_call(
    num_epochs: Any,
    save_freq: Any,
    *,
    callbacks: Sequence[Callable[..., Any]] | None,
    eval_loader: Iterable[Any] | None,
) -> None:
    """Raises ConfigError for an argument of ``train`` that is out of range."""
    if isinstance(num_epochs, bool) or not isinstance(num_epochs, int) or num_epochs < 0:
        raise ConfigError(
            "must be a whole number of epochs >= 0, counted from the start", argument="num_epochs", value=num_epochs
        )
    if save_freq is not None and (isinstance(save_freq, bool) or not isinstance(save_freq, int) or save_freq < 0):
        raise ConfigError(
            "must be >= 1 epoch, or None or 0 to write no numbered files", argument="save_freq", value=save_freq
        )
    if callable(callbacks):
        raise ConfigError("must be a list of functions; write [callback]", argument="callbacks", value=callbacks)
    for callback in callbacks or ():
        if not callable(callback):
            raise ConfigError(
                f"{callback!r} cannot be called; write functions (trainer, epoch, metrics)", argument="callbacks"
            )
    if isinstance(eval_loader, Sized):
        try:
            length = len(eval_loader)
        except TypeError:  # a DataLoader over a stream
            return
        if length == 0:
            raise ConfigError(
                "it is empty, so there is nothing to take a mean over; pass None", argument="eval_dataloader"
            )


def known_keys(overrides: Callable[[str], bool], *, evaluated: bool, has_metrics: bool) -> list[str] | None:
    """Returns the keys of a record that can be selected by; None where only an overridden method or a metric knows.

    Args:
        overrides: whether a subclass has a method of its own, by name.
        evaluated: whether there is a loader to evaluate.
        has_metrics: whether evaluations have metrics.

    Example:
        >>> known_keys(lambda method: False, evaluated=True, has_metrics=False)
        ['train_loss', 'lr', 'eval_loss']
    """
    if overrides("train_step") or overrides("train_epoch"):
        return None
    if evaluated and (has_metrics or overrides("eval_step") or overrides("evaluate")):
        return None
    return ["train_loss", "lr", "eval_loss"] if evaluated else ["train_loss", "lr"]


def rule_for(
    metric: str | None,
    mode: Mode | None,
    *,
    patience: int | None,
    min_delta: float,
    known: Sequence[str] | None,
) -> Callable[[], BestRule] | None:
    """Returns what makes the best rule of a call, or None for no rule.

    Args:
        metric: a key of the record, with the prefix of evaluations or without; None for no rule.
        mode: its direction, or None for that of its name.
        patience: epochs without improvement, or None.
        min_delta: smallest change that counts.
        known: the keys that a record will have; None where only training tells.

    Raises:
        ConfigError: the metric, its direction or the patience is wrong.

    Example:
        >>> rule_for("accuracy", None, patience=2, min_delta=0.0, known=None)().metric
        'eval_accuracy'
    """
    if metric is None:
        if patience is not None:
            raise ConfigError(
                "needs a metric, and best_model_metric is None", argument="early_stopping_patience", value=patience
            )
        return None
    name = metric if metric.startswith((PREFIX, "train_")) else PREFIX + metric
    if known is not None and not {name, metric} & set(known):
        raise ConfigError(
            f"no epoch's record will have it; they have {', '.join(known)}", argument="best_model_metric", value=metric
        )
    make = partial(MetricRule, name, mode, min_delta, patience)
    try:
        make()  # refuses bad values now
    except ConfigError as error:
        if error.argument == "metric":
            raise ConfigError(
                "its direction cannot be told from its name; pass best_mode='min' or best_mode='max'",
                argument="best_model_metric", value=name,
            ) from None  # fmt: skip
        raise error.renamed(_OURS.get(error.argument or "", str(error.argument))) from None
    return make


def say_if_finished(epochs: FaceEpochs, num_epochs: int) -> None:
    """Logs how to train on, where nothing is left to do."""
    done = epochs.engine.epoch
    if epochs.finished:
        _log.info("early stopping ended this run at epoch %d: pass a larger early_stopping_patience to train on", done)
    elif done >= num_epochs:
        _log.info(
            "%d epochs are completed and num_epochs=%d counts from the start: pass a larger one to train on",
            done, num_epochs,
        )  # fmt: skip
