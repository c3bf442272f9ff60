"""Selection of the best epoch by a metric that is named with or without the evaluation prefix."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from treadle.engine.best import BestRule, Mode, warn_of_direction
from treadle.errors import ConfigError
from treadle.errors.arguments import check_argument
from treadle.faces.loaders import (
    EvalLoaders,
    mode_of_metric,
    results_by_name,
    selected_by,
)

_log = logging.getLogger("treadle.functional")
PREFIX = "eval_"
_ARGUMENT_NAMES = {"mode": "best_mode", "patience": "early_stopping_patience"}  # of a best rule in `train`


class MetricRule(BestRule):
    """Best rule for a metric with or without the evaluation prefix in records."""

    def value_in(self, record: Mapping[str, Any]) -> float:
        """Return the metric's value in an epoch record.

        Raises:
            ConfigError: the record has neither name.
        """
        bare = self.metric.removeprefix(PREFIX)
        if self.metric not in record and bare in record:
            return float(record[bare])
        return super().value_in(record)


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
                "needs a metric, but best_model_metric is None", argument="early_stopping_patience", value=patience
            )
        return None
    name = metric if metric.startswith((PREFIX, "train_")) else PREFIX + metric
    if known is not None and not {name, metric} & set(known):
        raise ConfigError(
            f"epoch records will not contain it; they contain {', '.join(known)}",
            argument="best_model_metric",
            value=metric,
        )
    make = partial(MetricRule, name, mode or mode_of_metric(name.removeprefix(PREFIX), loaders), min_delta, patience)
    try:
        make()  # validates the values now
    except ConfigError as error:
        if error.argument == "metric":
            raise ConfigError(
                "its direction cannot be implied from its name; pass best_mode='min' or best_mode='max'",
                argument="best_model_metric", value=name,
            ) from None  # fmt: skip
        raise error.renamed(_ARGUMENT_NAMES.get(error.argument or "", str(error.argument))) from None
    warn_of_direction(name, mode, given=f"best_mode={mode!r}", logger=_log)
    return make


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


def eval_losses(loader: EvalLoaders | None) -> list[str]:
    """Return the keys of evaluation losses in a record: one, or one per loader of a dict.

    Example:
        >>> eval_losses(None), eval_losses([]), eval_losses({"near": [], "far": []})
        ([], ['eval_loss'], ['eval_near_loss', 'eval_far_loss'])
    """
    return [f"{PREFIX}{name}" for name in results_by_name(["loss"], loader)]
