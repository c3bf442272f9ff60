"""Validation and defaults of GraphTrainer's arguments."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import nn

from treadle.distributed import unwrap
from treadle.engine.best import BestRule, Mode, warn_of_direction
from treadle.errors import ConfigError
from treadle.errors.arguments import check_whole
from treadle.faces.loaders import EvalLoaders, mode_of_metric, results_by_name, selected_by
from treadle.graphs.epoch_records import TRAIN, VAL, GraphRule, missing_key
from treadle.graphs.losses import get_loss_fn
from treadle.graphs.metrics import GraphMetrics, get_metrics
from treadle.graphs.task import EpochMetrics, LossFn
from treadle.graphs.task_types import check_task_type, outputs_of
from treadle.optim.precision import PrecisionName

_log = logging.getLogger("treadle.graphs")


class Chosen(NamedTuple):
    """Loss, metrics and number of outputs of a trainer."""

    num_classes: int | None
    """Number of model outputs; None if the task allows any."""
    loss_fn: LossFn
    metrics: EpochMetrics


def loss_and_metrics(
    model: nn.Module, task_type: str, num_classes: int | None, loss_fn: LossFn | None, metrics: EpochMetrics | None
) -> Chosen:
    """Return the given loss and metrics, or the task's defaults.

    Raises:
        ConfigError: the task is unknown, or the two disagree on whether predictions are logits.

    Example:
        >>> loss_and_metrics(nn.Linear(1, 1), "regression", None, None, None).loss_fn
        GraphLoss('regression', 'mse', num_classes=None)
    """
    check_task_type(task_type)
    own = getattr(unwrap(model), "num_classes", None)
    if task_type == "classification" and num_classes is None and isinstance(own, int):
        num_classes = own
    classes = outputs_of(task_type, num_classes)
    if loss_fn is None:
        loss_fn = get_loss_fn(task_type, num_classes=classes)
    loss_logits = getattr(loss_fn, "from_logits", None)
    if metrics is None:
        metrics = get_metrics(task_type, classes or 2, from_logits=loss_logits is not False)
    if not all(callable(getattr(metrics, name, None)) for name in ("update", "compute", "reset")):
        raise ConfigError(
            "must have update, compute and reset, as what get_metrics(task_type) returns", argument="metrics",
            value=metrics,
        )  # fmt: skip
    metric_logits = getattr(metrics, "from_logits", None)
    if None not in (loss_logits, metric_logits) and loss_logits != metric_logits:
        raise ConfigError(
            f"loss_fn has from_logits={loss_logits} and metrics from_logits={metric_logits}: both read the same "
            "outputs, so they must agree; use loss_type='bce' with from_logits=False, any other loss with True"
        )
    return Chosen(classes, loss_fn, metrics)


def on_device(part: Any, device: torch.device) -> Any:
    """Move a loss or metrics to a device if they hold tensors.

    Example:
        >>> on_device(None, torch.device("cpu")) is None
        True
    """
    return part.to(device) if callable(getattr(part, "to", None)) else part


def precision_named(mixed_precision: bool | str | None) -> PrecisionName | None:
    """Return the name of the autocast dtype: True is bf16, False and None are full precision.

    Raises:
        ConfigError: the value is not supported.

    Example:
        >>> precision_named(True), precision_named(False), precision_named("fp16")
        ('bf16', None, 'fp16')
    """
    if mixed_precision is None or isinstance(mixed_precision, bool):
        return "bf16" if mixed_precision else None
    if mixed_precision not in get_args(PrecisionName):
        raise ConfigError(
            "must be False, True (bf16), 'bf16' or 'fp16'", argument="mixed_precision", value=mixed_precision
        )
    return mixed_precision  # type: ignore[return-value]  # one of the names


def check_log_every(log_every: int | None) -> None:
    """Raise ConfigError unless it is a whole number of steps, or None."""
    if log_every is not None:
        check_whole(0, log_every=log_every)


def check_epochs(epochs: Any) -> None:
    """Raise ConfigError unless it is an integer >= 0."""
    check_whole(0, epochs=epochs)


def best_rule(
    metric: str,
    minimize: bool | None,
    patience: int | None,
    min_delta: float,
    *,
    loaders: EvalLoaders | None,
    metrics: EpochMetrics,
) -> Callable[[], BestRule]:
    """Return a factory for the best-checkpoint rule.

    Args:
        metric: a key of the validation record, or of the training record without validation; with several loaders and
            no loader name, that of the first.
        minimize: direction of the metric; None infers it from the name.
        patience: epochs without improvement, or None.
        min_delta: minimum change that counts.
        loaders: loaders evaluated after each epoch, or None.
        metrics: metrics that may provide their names.

    Raises:
        ConfigError: the metric, its direction, the patience or the minimum change is invalid.

    Example:
        >>> best_rule("mae", None, 2, 0.0, loaders=[], metrics=get_metrics("regression"))().mode
        'min'
    """
    prefix, key = (TRAIN, metric) if loaders is None else (VAL, selected_by(metric, loaders))
    if isinstance(metrics, GraphMetrics):
        names = ["loss", *metrics.names]
        known = names if loaders is None else results_by_name(names, loaders)
        if key not in known:
            raise missing_key(metric, known, prefix)
    mode: Mode | None = None if minimize is None else "min" if minimize else "max"
    make = partial(GraphRule, f"{prefix}{key}", mode or mode_of_metric(key, loaders), min_delta, patience)
    make()  # rejects bad values immediately
    warn_of_direction(f"{prefix}{key}", mode, given=f"minimize_metric={minimize}", logger=_log)
    return make
