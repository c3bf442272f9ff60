"""Evaluation metrics: names, functions of outputs and targets, or torchmetrics-like objects."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from treadle import distributed
from treadle.engine.metric_kinds import METRIC_NAMES, ClassMetric, FunctionMetric, named_metric
from treadle.errors import ConfigError
from treadle.nested import flatten_nested_dict


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
        return named_metric(metric, loss_fn)
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


def _name_of(metric: Any) -> str:
    """Return ``accuracy`` for a MulticlassAccuracy, ``mean_squared_error`` for a MeanSquaredError."""
    word = re.sub(r"^(Binary|Multiclass|Multilabel)(?=[A-Z])", "", type(metric).__name__)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word).lower()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) and value.numel() != 1 else value
