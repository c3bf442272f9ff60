"""Evaluation metrics: names, functions of outputs and targets, or torchmetrics-like objects."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

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
"""Metrics that can be asked for by name."""


class Metric(Protocol):
    """Metric fed batch by batch."""

    def reset(self) -> None:
        """Clear the state."""

    def update(self, prediction: Any, target: Any) -> Any:
        """Add one batch."""

    def compute(self) -> Any:
        """Return a value or several by name."""


class EpochMetrics:
    """Named metrics of predictions and targets.

    A function is applied once to the outputs and targets of the whole set, concatenated on the CPU in the order of the
    loader and of the ranks, so uneven batches make no difference. Objects are updated batch by batch and average in
    their own way.

    Args:
        metrics: one metric, a list, or a dict by name, or None. Each is a name of :data:`METRIC_NAMES`, a function
            ``fn(outputs, targets)``, a torchmetrics object, or a collection whose ``compute`` returns a mapping.
        device: device of the state of objects.
        loss_fn: loss of the run; it tells named metrics whether outputs are logits and which label is ignored.

    Raises:
        ConfigError: a name is unknown, a function does not take two arguments, or an object lacks ``update``,
            ``compute`` or ``reset``.
        MissingExtraError: a name is given and torchmetrics is not installed.

    Example:
        >>> metrics = EpochMetrics({"gap": lambda outputs, targets: (outputs - targets).mean()}, torch.device("cpu"))
        >>> metrics.reset()
        >>> metrics.update((torch.ones(3), torch.zeros(3)))
        >>> metrics.update((torch.ones(1), torch.ones(1)))
        >>> metrics.compute()["gap"].item()
        0.75
    """

    def __init__(self, metrics: Any, device: torch.device, *, loss_fn: Any = None):
        self._named: dict[str | None, Any] = {}
        for name, metric in _by_name(metrics):
            made = _as_metric(metric, name, loss_fn)
            if name is not None and name in self._named:
                raise ConfigError(
                    f"two metrics are named {name!r}; pass a dict that gives each a name", argument="metrics"
                )
            self._named[name] = made.to(device) if callable(getattr(made, "to", None)) else made

    def __bool__(self) -> bool:
        return bool(self._named)

    def reset(self) -> None:
        """Clear the state."""
        for metric in self._named.values():
            metric.reset()

    def update(self, outputs: Any) -> None:
        """Add ``(prediction, target)`` of one batch."""
        prediction, target = outputs
        for metric in self._named.values():
            metric.update(prediction, target)

    def try_batch(self, outputs: Any) -> list[str] | None:
        """Apply the metrics to one batch before step 1, then discard it.

        Returns:
            The names of their values, or None if they are known only after a whole evaluation.

        Raises:
            ConfigError: one fails, or does not return a number.
        """
        self.reset()
        try:
            for name, metric in self._named.items():
                _try_on_batch(functools.partial(metric.update, *outputs), name, metric)
            results = {name: self._try_result(name, metric) for name, metric in self._named.items()}
        finally:
            self.reset()
        return None if None in results.values() else list(self._flat(results))

    def _try_result(self, name: str | None, metric: Any) -> Any:
        if isinstance(metric, FunctionMetric):
            return metric.try_first_batch()
        if distributed.world_size() > 1:  # compute() would communicate
            return None
        if isinstance(metric, ClassMetric):
            return _try_on_batch(metric.compute, name, metric)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return metric.compute()
        except Exception:  # noqa: BLE001  (it may need more rows)
            return None

    def compute(self) -> Mapping[str, Any]:
        """Return the values by name: numbers, and lists for metrics with several values."""
        values = self._flat({name: metric.compute() for name, metric in self._named.items()})
        return {name: _plain(value) for name, value in values.items()}

    def _flat(self, results: Mapping[str | None, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, result in results.items():
            if isinstance(result, Mapping):
                inner = {"/".join(path): value for path, value in flatten_nested_dict(result).items()}
                values.update({key if name is None else f"{name}/{key}": value for key, value in inner.items()})
            else:
                values[_name_of(self._named[name]) if name is None else name] = result
        return values


def _try_on_batch(call: Callable[[], Any], name: str | None, metric: Any) -> Any:
    """Return the result of a metric on one batch before step 1.

    Raises:
        ConfigError: it fails.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about too few rows
            return call()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{name or type(metric).__name__} fails on the first batch of the evaluation: {type(error).__name__}: "
            f"{error}",
            argument="metrics",
        ) from error


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


def _by_name(metrics: Any) -> list[tuple[str | None, Any]]:
    if metrics is None:
        return []
    if type(metrics) is dict:
        return list(metrics.items())
    listed = list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]
    return [(_own_name(metric, alone=not isinstance(metrics, (list, tuple))), metric) for metric in listed]


def _own_name(metric: Any, *, alone: bool) -> str | None:
    if isinstance(metric, str):
        return metric
    if not _missing(metric):
        return None if alone else _name_of(metric)
    name = getattr(metric, "__name__", None) or getattr(getattr(metric, "func", None), "__name__", None)
    if callable(metric) and (name is None or not name.isidentifier()):
        raise ConfigError(f"{metric!r} has no name; pass a dict, such as {{'mine': fn}}", argument="metrics")
    return name


def _missing(metric: Any) -> list[str]:
    """Return the methods of a metric that an object lacks."""
    return [word for word in ("update", "compute", "reset") if not callable(getattr(metric, word, None))]


def _as_metric(metric: Any, name: str | None, loss_fn: Any) -> Any:
    if isinstance(metric, str):
        if metric in _REGRESSION:
            kind, settings = _REGRESSION[metric]
            return getattr(_torchmetrics("regression"), kind)(**settings)
        if metric in _CLASSIFICATION:
            _torchmetrics("classification")
            return ClassMetric(metric, loss_fn)
        raise ConfigError(f"there is no metric {metric!r}; {nearest(metric, METRIC_NAMES)}", argument="metrics")
    if isinstance(metric, type):
        raise ConfigError(f"{metric.__name__} is a class; instantiate it: {metric.__name__}(...)", argument="metrics")
    missing = _missing(metric)
    if not missing:
        return metric
    if callable(metric) and len(missing) == 3:
        return FunctionMetric(metric, name or "metric")
    raise ConfigError(
        f"{type(metric).__name__} has no {missing[0]}(); pass torchmetrics objects, functions fn(outputs, targets), or "
        f"names, such as {', '.join(METRIC_NAMES[:2])}",
        argument="metrics",
    )


@functools.cache
def _torchmetrics(part: str) -> Any:
    try:
        return importlib.import_module(f"torchmetrics.{part}")
    except ImportError as error:
        raise MissingExtraError(
            f"metrics by name need torchmetrics ({error}): pip install 'treadle[metrics]', or pass functions "
            "fn(outputs, targets)"
        ) from error


def _name_of(metric: Any) -> str:
    """Return ``accuracy`` for a MulticlassAccuracy, ``mean_squared_error`` for a MeanSquaredError."""
    word = re.sub(r"^(Binary|Multiclass|Multilabel)(?=[A-Z])", "", type(metric).__name__)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word).lower()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) and value.numel() != 1 else value
