"""Early checks of arguments, and defaults for omitted ones."""

from __future__ import annotations

import logging
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from treadle.data.amount import batches_in
from treadle.engine.best import BestRule, EarlyStopping, Mode, resolve_mode
from treadle.engine.hook import BaseHook
from treadle.engine.limits import Limits
from treadle.engine.names import overridden_on_instance, refuse_signatures, takes, uncalled_methods
from treadle.errors import ConfigError
from treadle.errors.arguments import check_argument
from treadle.faces.loaders import (
    EvalLoaders,
    check_eval_loaders,
    check_loader,
    mode_over,
    refuse_used_up,
    results_by_name,
    selected_by,
)
from treadle.functional.claims import warn_of_claims
from treadle.functional.driver import PREFIX, FaceEpochs, MetricRule
from treadle.functional.settings import EVERY_EPOCH, TrainingSettings
from treadle.optim.optimizer import can_be_fused, decay_groups, move_optimizer_state
from treadle.optim.schedules import follow_shape

_log = logging.getLogger("treadle.functional")
# Names of a best rule's arguments in `train`.
_OURS = {"mode": "best_mode", "patience": "early_stopping_patience"}


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
            "must be an optimizer of torch, made for the model, such as "
            "AdamW(model.parameters(), lr=1e-3), or None for one made from the config",
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
        own = {float(group.get(f"initial_{key}", group.get(key, 0.0))) for group in optimizer.param_groups}
        if wanted is not None and wanted not in own:
            _log.warning(
                "config.training.%s=%s: the given optimizer has %s and keeps it; pass optimizer=None to have one built "
                "from the config",
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
            "config.training.scheduler_step_per_batch=True: %s",
            "a ReduceLROnPlateau moves with each new value of the best metric" if plateau else "there is no scheduler",
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
            f"a {type(scheduler).__name__} is given as scheduler= too; keep one of the two",
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
            "the loader has no length, so the steps of the run are not known; pass "
            "scheduler=treadle.build_schedule(optimizer, name, total_steps=...) and scheduler_step_per_batch=True",
            argument="lr_scheduler",
            value=settings.lr_scheduler,
        ) from None
    for name, amount in (("limit_train_batches", limits.train), ("overfit_batches", limits.overfit_batches)):
        if amount is not None and batches:
            batches = min(batches, batches_in(amount, batches, name))
    if steps := epochs * math.ceil(batches / settings.gradient_accumulation_steps):
        follow_shape(scheduler, settings.schedule, steps)


def check_loss_fn(loss_fn: Any, *, own_loss: bool, optimizer: Optimizer | None = None) -> None:
    """Raise ConfigError for a loss that is a class or not a scalar, and warn about its untrained parameters.

    Args:
        loss_fn: the loss, or None.
        own_loss: whether a subclass computes the loss itself, and so may reduce it.
        optimizer: optimizer, which may hold parameters of the loss.
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
    own = (
        [parameter for parameter in loss_fn.parameters() if parameter.requires_grad]
        if isinstance(loss_fn, nn.Module)
        else []
    )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} if optimizer else set()
    if any(id(parameter) not in held for parameter in own):
        _log.warning(
            "loss_fn: %s has parameters that require gradients and are in no group of the optimizer, so they are not "
            "trained; build the optimizer over them too, or make the loss a part of the model",
            type(loss_fn).__name__,
        )


def check_call(
    trainer: Any,
    num_epochs: Any,
    save_freq: Any,
    *,
    callbacks: Sequence[Callable[..., Any]] | None,
    loaders: tuple[Iterable[Any], EvalLoaders | None],
    paths: Mapping[str, Any],
) -> None:
    """Raise ConfigError for an argument of ``train`` outside its range; warn about methods that nothing calls.

    Args:
        trainer: the trainer.
        num_epochs: the user's argument.
        save_freq: the user's argument.
        callbacks: the user's argument.
        loaders: training and evaluation loaders.
        paths: arguments that are paths, by name.
    """
    for warning in unused_names(trainer, trainer._face):
        _log.warning("%s", warning)
    for name, path in paths.items():
        check_argument(name, path, str | Path | None)
    train_loader, eval_loader = loaders
    check_loader(train_loader, "train_dataloader")
    if isinstance(num_epochs, bool) or not isinstance(num_epochs, int) or num_epochs < 0:
        raise ConfigError(
            "must be a whole number of epochs >= 0, counted from the start", argument="num_epochs", value=num_epochs
        )
    if save_freq is not None and (isinstance(save_freq, bool) or not isinstance(save_freq, int) or save_freq < 0):
        raise ConfigError(
            "must be >= 1 epoch, or None or 0 to write no numbered files", argument="save_freq", value=save_freq
        )
    if callbacks is not None and not isinstance(callbacks, (Sequence, Set)):
        raise ConfigError("must be a list of functions; write [callback]", argument="callbacks", value=callbacks)
    for callback in callbacks or ():
        check_callback(callback)
    check_eval_loaders(eval_loader, "eval_dataloader")
    refuse_used_up(eval_loader, "eval_dataloader", times=num_epochs)
    steps = trainer.settings.gradient_accumulation_steps
    warn_of_claims(trainer._claims, num_epochs=num_epochs, loaders=loaders, accumulation=steps)
    evaluates = trainer._is_own("evaluate") or trainer._is_own("eval_step") or trainer._eval_task.metrics
    if eval_loader is None and evaluates:
        _log.info("eval_dataloader=None: no epoch is evaluated; metrics and evaluate() serve calls of your own")


def warn_of_idle_files(settings: TrainingSettings, save_dir: Any, *, save_freq: Any, metric: str | None) -> None:
    """Warn about settings of files that a call without a folder, or without a metric, does not write.

    Example:
        >>> warn_of_idle_files(TrainingSettings(), None, save_freq=EVERY_EPOCH, metric="loss")
    """
    limits = [name for name in ("save_total_limit", "save_top_k") if getattr(settings, name) is not None]
    given = [*limits, *(["save_freq"] if save_freq and save_freq is not EVERY_EPOCH else [])]
    if save_dir is None and given and not settings.fast_dev_run:
        _log.warning("%s: nothing is written without save_dir; pass save_dir= to train()", ", ".join(given))
    elif metric is None and "save_top_k" in limits:
        _log.warning("save_top_k=%d: no epoch is the best with best_model_metric=None", settings.save_top_k)


def check_callback(callback: Any) -> None:
    """Raise ConfigError for a callback that cannot be called as ``callback(trainer, epoch, metrics)``.

    Example:
        >>> check_callback(lambda trainer, epoch, metrics: None)
    """
    instead = ""
    if isinstance(callback, (EarlyStopping, BestRule)):
        instead = "; to stop early pass early_stopping_patience= and best_model_metric= to train()"
    elif isinstance(callback, BaseHook):
        instead = "; it is a hook: pass it as hooks=[...] when the trainer is made"
    elif callable(callback) and takes(callback, 3):
        return
    raise ConfigError(
        f"{callback!r} cannot be called with (trainer, epoch, metrics){instead or '; write a function of these'}",
        argument="callbacks",
    )


def eval_losses(loader: EvalLoaders | None) -> list[str]:
    """Return the keys of evaluation losses in a record: one, or one per loader of a dict.

    Example:
        >>> eval_losses(None), eval_losses([]), eval_losses({"near": [], "far": []})
        ([], ['eval_loss'], ['eval_near_loss', 'eval_far_loss'])
    """
    return [f"{PREFIX}{name}" for name in results_by_name(["loss"], loader)]


def selected_key(metric: str | None, loaders: EvalLoaders | None) -> str | None:
    """Return the key of a record that a metric refers to, given the evaluation loaders.

    Example:
        >>> selected_key("loss", None), selected_key("accuracy", {"near": [], "far": []})
        ('train_loss', 'near_accuracy')
    """
    if metric is None or metric == "lr" or metric.startswith("train_"):
        return metric
    if loaders is None and metric.removeprefix(PREFIX) == "loss":
        return "train_loss"
    return selected_by(metric.removeprefix(PREFIX), loaders) if isinstance(loaders, Mapping) else metric


def known_keys(overrides: Callable[[str], bool], *, losses: Sequence[str], has_metrics: bool) -> list[str] | None:
    """Return the selectable keys of a record; None if they depend on an overridden method or a metric.

    Args:
        overrides: whether a subclass overrides a method, by name.
        losses: keys of the evaluation losses.
        has_metrics: whether evaluations have metrics.

    Example:
        >>> known_keys(lambda method: False, losses=["eval_loss"], has_metrics=False)
        ['train_loss', 'lr', 'eval_loss']
    """
    if overrides("train_step") or overrides("train_epoch"):
        return None
    if losses and (has_metrics or overrides("eval_step") or overrides("evaluate")):
        return None
    return ["train_loss", "lr", *losses]


def rule_for(
    metric: str | None,
    mode: Mode | None,
    *,
    patience: int | None,
    min_delta: float,
    loaders: EvalLoaders | None,
    known: Sequence[str] | None,
) -> Callable[[], BestRule] | None:
    """Return a function that creates the best rule of a call, or None for no rule.

    Args:
        metric: a key of the record, with or without the evaluation prefix; None for no rule.
        mode: its direction, or None for the one implied by its name.
        patience: epochs without improvement, or None.
        min_delta: smallest change that counts.
        loaders: loaders to evaluate after each epoch.
        known: the keys that a record will have; None if known only after training.

    Raises:
        ConfigError: the metric, its direction or the patience is wrong.

    Example:
        >>> rule_for("accuracy", None, patience=2, min_delta=0.0, loaders=[], known=None)().metric
        'eval_accuracy'
    """
    check_argument("best_model_metric", metric, str | None)
    metric = selected_key(metric, loaders)
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
    make = partial(MetricRule, name, mode or mode_over(name.removeprefix(PREFIX), loaders), min_delta, patience)
    try:
        make()  # validates the values now
    except ConfigError as error:
        if error.argument == "metric":
            raise ConfigError(
                "its direction cannot be told from its name; pass best_mode='min' or best_mode='max'",
                argument="best_model_metric", value=name,
            ) from None  # fmt: skip
        raise error.renamed(_OURS.get(error.argument or "", str(error.argument))) from None
    _warn_of_direction(name, mode)
    return make


def _warn_of_direction(name: str, mode: Mode | None) -> None:
    """Warn if the given direction contradicts the one implied by the metric's name."""
    try:
        told = resolve_mode(name.removeprefix(PREFIX))
    except ConfigError:
        return
    if mode is not None and mode != told:
        _log.warning(
            "best_mode=%r: %s is better the %s it is, by its name, and the epoch with the %s is selected",
            mode, name, "higher" if told == "max" else "lower", "lowest" if mode == "min" else "highest",
        )  # fmt: skip


_ARGUMENTS = {
    "train_step": (1,), "train_epoch": (3, 2), "eval_step": (1,), "evaluate": (1,), "_prepare_batch": (1,),
    "_forward_pass": (1,), "_compute_loss": (2,), "_loss_weight": (3,),
}  # fmt: skip
_LOOKED_UP_ON_THE_CLASS = ("train_step", "eval_step")
_FOREIGN = {
    "training_step": "train_step or _compute_loss", "_train_step": "train_step", "compute_loss": "_compute_loss",
    "validation_step": "eval_step", "_run_step": "train_step", "_evaluate": "evaluate",
    "_train_epoch": "train_epoch", "forward": "_forward_pass", "_forward": "_forward_pass",
    "prediction_step": "_forward_pass", "test_step": "eval_step", "predict_step": "_forward_pass",
    "configure_optimizers": "pass optimizer= and scheduler= to the trainer",
    "create_optimizer": "pass optimizer= to the trainer",
    "train_dataloader": "pass the loader to train()",
    "get_train_dataloader": "pass the loader to train()",
    "val_dataloader": "pass eval_dataloader= to train()",
    "get_eval_dataloader": "pass eval_dataloader= to train()",
    "compute_metrics": "evaluate, or pass metrics= to the trainer",
    "save_checkpoint": "_save_checkpoint", "save_model": "_save_checkpoint",
    "on_epoch_end": "pass a function in callbacks=[...] to train()",
}  # fmt: skip


def unused_names(trainer: Any, base: type) -> list[str]:
    """Return warnings about methods of a trainer that nothing calls: misspelt, from another library, or on the
    instance.

    Raises:
        ConfigError: an override does not accept the arguments it will be called with.

    Example:
        >>> unused_names(object(), object)
        []
    """
    if hasattr(trainer, "train_epoch"):
        refuse_signatures(trainer, _ARGUMENTS)
    set_on_it = [] if not hasattr(trainer, "__dict__") else overridden_on_instance(trainer, _LOOKED_UP_ON_THE_CLASS)
    return [*uncalled_methods(type(trainer), base, known=_ARGUMENTS, foreign=_FOREIGN), *set_on_it]


def log_early_stopping(epochs: FaceEpochs) -> None:
    """Log how to train on, where early stopping has ended the run; of a reached target the engine does."""
    if epochs.finished:
        level = logging.WARNING if epochs.engine.state.num_runs else logging.INFO
        text = "early stopping ended this run at epoch %d: pass a larger early_stopping_patience to train on"
        _log.log(level, text, epochs.engine.epoch)
