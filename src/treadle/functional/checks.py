"""Checks of the arguments and overrides of a trainer's calls, before any work is done."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from treadle.engine.best import BestRule, EarlyStopping
from treadle.engine.hook import BaseHook
from treadle.engine.idle_names import keys_in_vain, names_in_vain
from treadle.engine.names import overridden_on_instance, refuse_signatures, takes, uncalled_methods
from treadle.errors import ConfigError
from treadle.errors.arguments import check_argument, check_least, check_whole
from treadle.faces.loaders import (
    EvalLoaders,
    check_eval_loaders,
    check_loader,
    refuse_used_up,
)
from treadle.functional.driver import FaceEpochs
from treadle.functional.settings import EVERY_EPOCH, TrainingSettings
from treadle.functional.unused_settings import warn_of_unused_settings

_log = logging.getLogger("treadle.functional")
_ARGUMENTS = {
    "train_step": (1,), "train_epoch": (3, 2), "eval_step": (1,), "evaluate": (1,), "_prepare_batch": (1,),
    "_forward_pass": (1,), "_compute_loss": (2,), "_loss_weight": (3,), "_save_checkpoint": (3,),
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
    check_whole(0, num_epochs=num_epochs)
    check_argument("save_freq", save_freq, int | None)
    check_least(0, save_freq=save_freq)
    if callbacks is not None and not isinstance(callbacks, (Sequence, Set)):
        raise ConfigError("must be a list of functions; write [callback]", argument="callbacks", value=callbacks)
    for callback in callbacks or ():
        check_callback(callback)
    check_eval_loaders(eval_loader, "eval_dataloader")
    refuse_used_up(eval_loader, "eval_dataloader", times=num_epochs)
    steps = trainer.settings.gradient_accumulation_steps
    warn_of_unused_settings(trainer._unused_settings, num_epochs=num_epochs, loaders=loaders, accumulation=steps)
    evaluates = trainer._is_own("evaluate") or trainer._is_own("eval_step") or trainer._eval_task.metrics
    if eval_loader is None and evaluates:
        _log.info(
            "eval_dataloader=None: no evaluation during training; metrics and evaluate() are used only if you "
            "call evaluate()"
        )


def warn_of_callbacks(trainer: Any, callbacks: Sequence[Callable[..., Any]] | None, keys: Sequence[str] | None) -> None:
    """Warn about attributes and keys that callbacks read in vain.

    Args:
        trainer: the trainer.
        callbacks: the user's argument.
        keys: the keys of a record; None if unknown.
    """
    for callback in callbacks or ():
        known = None if keys is None else ["epoch", *keys]
        function = callback if hasattr(callback, "__code__") else getattr(callback, "__call__", callback)  # noqa: B004
        place = getattr(callback, "__qualname__", type(callback).__name__)
        for text in (
            *names_in_vain(function, trainer, may_set=trainer._engine.state.objects.may_set, place=place),
            *(() if known is None else keys_in_vain(function, 2, known=known, place=place)),
        ):
            _log.warning("callbacks: %s", text)


def warn_of_idle_files(settings: TrainingSettings, save_dir: Any, *, save_freq: Any, metric: str | None) -> None:
    """Warn about settings of files that a call without a folder, or without a metric, does not write.

    Example:
        >>> warn_of_idle_files(TrainingSettings(), None, save_freq=EVERY_EPOCH, metric="loss")
    """
    limits = [name for name in ("save_total_limit", "save_top_k") if getattr(settings, name) is not None]
    given = [*limits, *(["save_freq"] if save_freq and save_freq is not EVERY_EPOCH else [])]
    if save_dir is None and given and not settings.fast_dev_run:
        _log.warning("%s has no effect without save_dir; pass save_dir= to train()", ", ".join(given))
    elif metric is None and "save_top_k" in limits:
        _log.warning("save_top_k=%d has no effect: best_model_metric=None selects no best epoch", settings.save_top_k)


def check_callback(callback: Any) -> None:
    """Raise ConfigError for a callback that cannot be called as ``callback(trainer, epoch, metrics)``.

    Example:
        >>> check_callback(lambda trainer, epoch, metrics: None)
    """
    instead = ""
    if isinstance(callback, (EarlyStopping, BestRule)):
        instead = "; for early stopping pass early_stopping_patience= and best_model_metric= to train()"
    elif isinstance(callback, BaseHook):
        instead = "; it is a hook: pass it to the trainer in hooks=[...]"
    elif callable(callback) and takes(callback, 3):
        return
    raise ConfigError(
        f"{callback!r} cannot be called with (trainer, epoch, metrics)"
        f"{instead or '; pass a function that takes these'}",
        argument="callbacks",
    )


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
        text = "early stopping ended this run at epoch %d; pass a larger early_stopping_patience to train further"
        _log.log(level, text, epochs.engine.epoch)
