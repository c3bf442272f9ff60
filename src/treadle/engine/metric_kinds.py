"""Kinds of metrics: a function of all outputs and targets, and the metrics that torchmetrics has by name."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from treadle import distributed
from treadle.engine.outputs import joined, outputs_on_cpu
from treadle.errors import ConfigError, MissingExtraError, nearest
from treadle.nested import flatten_nested_dict

_log = logging.getLogger("treadle.metrics")
# Class name in torchmetrics, and settings for class targets.
_CLASSIFICATION: dict[str, tuple[str, dict[str, Any]]] = {
    "accuracy": ("Accuracy", {"average": "micro"}),
    "auroc": ("AUROC", {"average": "macro"}),
    "average_precision": ("AveragePrecision", {"average": "macro"}),
    "f1": ("F1Score", {"average": "macro"}),
    "precision": ("Precision", {"average": "macro"}),
    "recall": ("Recall", {"average": "macro"}),
}
_REGRESSION: dict[str, tuple[str, dict[str, Any]]] = {
    "mae": ("MeanAbsoluteError", {}),
    "mse": ("MeanSquaredError", {}),
    "r2": ("R2Score", {}),
    "rmse": ("MeanSquaredError", {"squared": False}),
}
METRIC_NAMES = sorted([*_CLASSIFICATION, *_REGRESSION])
"""Metrics available by name."""


def named_metric(name: str, loss_fn: Any) -> Any:
    """Return a metric of torchmetrics by one of :data:`METRIC_NAMES`.

    Raises:
        ConfigError: the name is unknown.
        MissingExtraError: torchmetrics is not installed.
    """
    if name in _REGRESSION:
        kind, settings = _REGRESSION[name]
        return getattr(_torchmetrics("regression"), kind)(**settings)
    if name in _CLASSIFICATION:
        _torchmetrics("classification")
        return ClassMetric(name, loss_fn)
    raise ConfigError(f"there is no metric {name!r}; {nearest(name, METRIC_NAMES)}", argument="metrics")


class FunctionMetric:
    """Metric that applies a function to all outputs and targets of an evaluation, in the order of loader and ranks.

    Args:
        function: ``function(outputs, targets)`` on the CPU; returns a number, a 0-d tensor, or a mapping of them.
        name: for messages.

    Raises:
        ConfigError: it cannot be called with two arguments.

    Example:
        >>> metric = FunctionMetric(lambda outputs, targets: (outputs == targets).float().mean(), "same")
        >>> metric.update(torch.tensor([1, 2]), torch.tensor([1, 1])); metric.compute().item()
        0.5
    """

    def __init__(self, function: Callable[[Any, Any], Any], name: str):
        try:
            inspect.signature(function).bind(None, None)
        except TypeError as error:
            raise ConfigError(
                f"{name} cannot be called as {name}(outputs, targets): {error}", argument="metrics"
            ) from None
        except ValueError:  # a function without a signature
            pass
        self._function = function
        self._name = name
        self._batches: list[Any] = []

    def reset(self) -> None:
        """Clear the state."""
        self._batches = []

    def update(self, prediction: Any, target: Any) -> None:
        """Keep outputs and targets of one batch on the CPU."""
        self._batches.append(outputs_on_cpu((prediction, target)))

    def compute(self) -> Any:
        """Apply the function to all batches of all ranks, then release them."""
        batches = [batch for part in distributed.gather_objects(self._batches) for batch in part if batch is not None]
        self.reset()
        if not batches:
            return float("nan")
        try:
            outputs, targets = joined(batches)
        except ConfigError as error:
            raise error.renamed("metrics") from None
        with torch.no_grad():
            return self._checked(self._function(outputs, targets))

    def try_first_batch(self) -> Any:
        """Return the result on the batches so far, or None. A ValueError only warns: a few rows may lack a class.

        Raises:
            ConfigError: it fails otherwise, or does not return a number.
        """
        batches = [batch for batch in self._batches if batch is not None]
        if not batches:
            return None
        outputs, targets = joined(batches)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about too few rows
                return self._checked(self._function(outputs, targets))
        except ConfigError:
            raise
        except ValueError as error:
            _log.warning("metrics: %s fails when called on the first batch alone: %s", self._name, error)
            return None
        except Exception as error:
            raise ConfigError(
                f"{self._name}(outputs, targets) fails on the first batch: {type(error).__name__}: {error}",
                argument="metrics",
            ) from error

    def _checked(self, result: Any) -> Any:
        values = list(flatten_nested_dict(result).values()) if isinstance(result, Mapping) else [result]
        for value in values:
            if isinstance(value, str) or not (hasattr(value, "__float__") or isinstance(value, list)):
                raise ConfigError(
                    f"{self._name} returned a {type(value).__name__}; return a number, a 0-d tensor or a dict of them",
                    argument="metrics",
                )
        return result


class ClassMetric:
    """Named torchmetrics metric, created from the shapes of the first batch.

    Targets are classes if they are integers of shape (N, ...) and outputs have the shape (N, C, ...): the metric is
    updated batch by batch. If both have the same shape, or outputs (N, 1), targets are 0 or 1 and all rows are scored
    at once, since only all of them together show whether outputs are logits: they are if ``loss_fn`` takes logits or
    any is outside [0, 1].

    Args:
        name: name of a classification metric.
        loss_fn: loss of the run, or None.
    """

    def __init__(self, name: str, loss_fn: Any):
        self._name = name
        self._kind, self._settings = _CLASSIFICATION[name]
        self._logits = _takes_logits(loss_fn)
        self._ignored = getattr(loss_fn, "ignore_index", -100)
        self._metric: Any = None
        self._rows = FunctionMetric(self._of_rows, name)
        self._shape: tuple[str, int] | None = None

    def reset(self) -> None:
        """Clear the state."""
        self._rows.reset()
        self._metric = None

    def update(self, prediction: Any, target: Any) -> None:
        """Add one batch.

        Raises:
            ConfigError: the shapes or types of outputs and targets do not fit classification.
        """
        shape = self._shape_of(prediction, target)
        if shape[0] != "classes":
            one_each = prediction.shape != target.shape or math.prod(prediction.shape[1:]) == 1
            rows = prediction.flatten(1).squeeze(1) if one_each and prediction.dim() > 1 else prediction
            self._rows.update(rows, target.reshape(rows.shape))
            return
        self._shape = shape
        self._make(shape[1], prediction.device).update(prediction, target)

    def compute(self) -> Any:
        """Return the value over all batches of all ranks."""
        shapes = [shape for shape in distributed.gather_objects(self._shape) if shape is not None]
        if not shapes:
            return self._rows.compute()
        value = self._make(shapes[0][1], torch.device("cpu")).compute()
        self._metric = None  # else checkpoints would hold it, and a run that resumes creates it too late
        return value

    def _make(self, classes: int, device: torch.device) -> Any:
        if self._metric is None:
            kind = getattr(_torchmetrics("classification"), f"Multiclass{self._kind}")
            self._metric = kind(num_classes=classes, ignore_index=self._ignored, **self._settings).to(device)
        return self._metric

    def _shape_of(self, prediction: Any, target: Any) -> tuple[str, int]:
        if not (isinstance(prediction, Tensor) and isinstance(target, Tensor)):
            given = f"{type(prediction).__name__} and {type(target).__name__}"
            raise ConfigError(
                f"{self._name} needs a tensor of outputs and one of targets, not {given}", argument="metrics"
            )
        if prediction.is_floating_point():
            same = prediction.shape == target.shape or prediction.shape in ((*target.shape, 1), target.shape[:-1])
            if same and prediction.numel() == target.numel():
                return "rows", 0
            per_class = prediction.dim() >= 2 and prediction.shape[2:] == target.shape[1:]
            if per_class and len(prediction) == len(target) and not target.is_floating_point():
                return "classes", prediction.shape[1]
        raise ConfigError(
            f"{self._name} needs outputs of shape (N, C, ...) and integer targets of shape (N, ...), or both of one "
            f"shape, not {tuple(prediction.shape)} {prediction.dtype} and {tuple(target.shape)} {target.dtype}; pass "
            "a function fn(outputs, targets) that rearranges them, for example one that shifts the labels of a "
            "language model",
            argument="metrics",
        )

    def _of_rows(self, scores: Tensor, targets: Tensor) -> Any:
        if ((targets != 0) & (targets != 1)).any():
            raise ConfigError(
                f"{self._name} needs class indices, or targets of 0 and 1 if outputs and targets have one shape; use "
                "a regression metric, such as 'mae', or give integer targets of shape (N, ...)",
                argument="metrics",
            )
        scores = scores.double()
        if self._logits is True:
            scores = scores.sigmoid()
        functional = _torchmetrics("functional.classification")
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", self._kind).lower()
        if scores.dim() == 1:
            return getattr(functional, f"binary_{name}")(scores, targets.long())
        settings = {"average": "macro"}
        return getattr(functional, f"multilabel_{name}")(scores, targets.long(), num_labels=scores.shape[1], **settings)


def _takes_logits(loss_fn: Any) -> bool | None:
    """Return whether a loss takes logits; None if unknown."""
    if isinstance(loss_fn, nn.BCEWithLogitsLoss) or loss_fn is nn.functional.binary_cross_entropy_with_logits:
        return True
    return False if isinstance(loss_fn, nn.BCELoss) else None


@functools.cache
def _torchmetrics(part: str) -> Any:
    try:
        return importlib.import_module(f"torchmetrics.{part}")
    except ImportError as error:
        raise MissingExtraError(
            f"metrics by name need torchmetrics ({error}): pip install 'treadle[metrics]', or pass functions "
            "fn(outputs, targets)"
        ) from error
