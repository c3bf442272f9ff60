"""Rule for the best value of a metric: improvement, best epoch and early stopping."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, checked

Mode = Literal["min", "max"]

_MIN = {"mse", "mae", "rmse", "sse", "nll", "bic", "aic", "error", "err", "ppl", "perplexity"}
_MAX = {
    "accuracy", "acc", "f1", "f1_macro", "f1_micro", "auc", "roc_auc", "ap", "map", "recall", "precision", "r2", "iou",
    "psnr", "ssim", "loglik",
}  # fmt: skip


def warn_of_direction(metric: str, mode: Mode | None, *, given: str, logger: logging.Logger) -> None:
    """Warn if a given direction contradicts the one that the metric's name implies.

    Args:
        metric: its name.
        mode: the direction, or None.
        given: the argument with its value, for the warning.
        logger: the logger of the warning.
    """
    try:
        implied = resolve_mode(metric)
    except ConfigError:
        return
    if mode is not None and mode != implied:
        logger.warning(
            "%s: the name of %s means that %s is better, but the epoch with the %s value will be selected",
            given, metric, "higher" if implied == "max" else "lower", "lowest" if mode == "min" else "highest",
        )  # fmt: skip


def resolve_mode(metric: str, mode: Mode | None = None) -> Mode:
    """Return the direction of a metric: the given one, or the one that the last part of its name implies.

    Args:
        metric: for example ``"val_loss"`` or ``"eval/accuracy"``.
        mode: ``"min"``, ``"max"`` or None.

    Raises:
        ConfigError: the mode is unknown, or the name implies no direction.

    Example:
        >>> resolve_mode("val_loss"), resolve_mode("eval/precision@5")
        ('min', 'max')
    """
    if mode is not None:
        if mode not in ("min", "max"):
            raise ConfigError("must be 'min', 'max' or None", argument="mode", value=mode)
        return mode
    name = re.sub(r"^(train|val|eval|test)_", "", metric.rsplit("/", 1)[-1]).lower()
    if name.endswith("loss") or name in _MIN:
        return "min"
    if name in _MAX or re.fullmatch(r"precision@\d+", name):
        return "max"
    raise ConfigError(
        "its name does not show whether lower or higher is better; pass mode='min' or mode='max'",
        argument="metric",
        value=metric,
    )


class BestRule:
    """Rule of the best value of one metric, with a count of the epochs without improvement.

    Improved (min) means value < best - min_delta, (max) value > best + min_delta. NaN and infinities never improve.

    Args:
        metric: the name in the epoch record.
        mode: ``"min"``, ``"max"``, or None for the direction implied by the name.
        min_delta: smallest change that counts, >= 0.
        patience: non-improving epochs until ``should_stop``, >= 1; None never stops.
        start_epoch: non-improving epochs before this one are not counted.

    Raises:
        ConfigError: a value is outside its range, or the direction is unknown.

    Example:
        >>> rule = BestRule("val_loss", patience=2)
        >>> [rule.update(epoch, value) for epoch, value in enumerate([1.0, 0.5, 0.6, 0.7], start=1)]
        [True, True, False, False]
        >>> rule.best, rule.best_epoch, rule.should_stop
        (0.5, 2, True)
    """

    @checked
    def __init__(
        self,
        metric: str,
        mode: Mode | None = None,
        min_delta: float = 0.0,
        patience: int | None = None,
        start_epoch: int = 1,
    ):
        check_least(0, min_delta=min_delta)
        check_least(1, patience=patience)
        self.metric = metric
        self.mode = resolve_mode(metric, mode)
        self.min_delta = min_delta
        self.patience = patience
        check_least(0, start_epoch=start_epoch)
        self.start_epoch = start_epoch
        self.best = math.inf if self.mode == "min" else -math.inf
        self.best_epoch: int | None = None
        self.count = 0

    @property
    def should_stop(self) -> bool:
        """Whether ``patience`` epochs passed without an improvement."""
        return self.patience is not None and self.count >= self.patience

    def update(self, epoch: int, value: float) -> bool:
        """Record the value of an epoch (1-based) and return whether it is an improvement."""
        value = float(value)
        better = value < self.best - self.min_delta if self.mode == "min" else value > self.best + self.min_delta
        if math.isfinite(value) and better:
            self.best, self.best_epoch, self.count = value, epoch, 0
            return True
        if epoch >= self.start_epoch:
            self.count += 1
        return False

    def count_from(self, epoch: int) -> None:
        """Set the first epoch whose failure to improve counts."""
        self.start_epoch = epoch

    def value_in(self, record: Mapping[str, Any]) -> float:
        """Return the metric's value in an epoch record.

        Raises:
            ConfigError: the record has no such key; the keys present are listed.
        """
        if self.metric not in record:
            raise ConfigError(f"best metric {self.metric!r} is not in the epoch's record; it has {', '.join(record)}")
        return float(record[self.metric])

    def ranked(self, records: Iterable[Mapping[str, Any]]) -> list[int]:
        """Return the epochs of records with a finite value, best first; ties keep the earlier epoch first.

        Example:
            >>> BestRule("val_loss").ranked([{"epoch": 1, "val_loss": 0.5}, {"epoch": 2, "val_loss": 0.4}])
            [2, 1]
        """
        found: list[tuple[float, int]] = []
        for record in records:
            with contextlib.suppress(ConfigError):  # an epoch that was not evaluated
                value = self.value_in(record)
                if math.isfinite(value):
                    found.append((value if self.mode == "min" else -value, record["epoch"]))
        return [epoch for _, epoch in sorted(found)]

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's state as plain values."""
        return {
            "metric": self.metric, "mode": self.mode, "best": self.best, "best_epoch": self.best_epoch,
            "count": self.count,
        }  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ConfigError: the state belongs to another metric or direction.
        """
        if (state_dict["metric"], state_dict["mode"]) != (self.metric, self.mode):
            raise ConfigError(
                f"best metric: the checkpoint selects by {state_dict['metric']!r} ({state_dict['mode']}), this run by "
                f"{self.metric!r} ({self.mode}); keep the metric, or start a new run"
            )
        self.best = float(state_dict["best"])
        self.best_epoch = state_dict["best_epoch"]
        self.count = int(state_dict["count"])


class EarlyStopping:
    """Early stopping: a callable over :class:`BestRule` that returns whether to stop.

    Args:
        patience: non-improving values until it returns True, >= 1.
        min_delta: smallest change that counts.
        mode: ``"min"`` or ``"max"``.
        start_epoch: values before this one are not counted.

    Example:
        >>> stop = EarlyStopping(patience=2)
        >>> [stop(value) for value in (1, 1, 1, 0.5, 0.6, 0.6)]
        [False, False, True, False, False, True]
    """

    @checked
    def __init__(self, patience: int = 10, min_delta: float = 0.0, mode: Mode = "min", *, start_epoch: int = 1):
        self.rule = BestRule("value", mode, min_delta, patience, start_epoch)
        self.epoch = 0

    def __call__(self, value: float) -> bool:
        """Record the value of the next epoch and return whether to stop."""
        self.epoch += 1
        self.rule.update(self.epoch, float(value))
        return self.rule.should_stop

    @property
    def best(self) -> float:
        """The best value so far."""
        return self.rule.best

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {"epoch": self.epoch, "rule": self.rule.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.epoch = int(state_dict["epoch"])
        self.rule.load_state_dict(state_dict["rule"])
