"""Metrics of an evaluation by objects in the manner of torchmetrics: ``update``, ``compute``, ``reset``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from treadle.errors import ConfigError
from treadle.nested import flatten_nested_dict


class EpochMetrics:
    """Keeps metric objects under names and feeds them predictions and targets.

    Args:
        metrics: one metric, a collection whose ``compute`` returns a mapping, a dict of either, or None.
        device: where their state lives.

    Raises:
        ConfigError: something in it has no ``update``, ``compute`` or ``reset``.

    Example:
        >>> class Count:
        ...     def reset(self):
        ...         self.n = 0
        ...     def update(self, prediction, target):
        ...         self.n += len(target)
        ...     def compute(self):
        ...         return self.n
        >>> metrics = EpochMetrics({"n": Count()}, torch.device("cpu"))
        >>> metrics.reset()
        >>> metrics.update((torch.zeros(3), torch.zeros(3)))
        >>> metrics.compute()
        {'n': 3}
    """

    def __init__(self, metrics: Any, device: torch.device):
        named = metrics if type(metrics) is dict else {} if metrics is None else {None: metrics}
        self._named: dict[str | None, Any] = {}
        for name, metric in named.items():
            missing = [word for word in ("update", "compute", "reset") if not callable(getattr(metric, word, None))]
            if missing:
                raise ConfigError(
                    f"{type(metric).__name__} has no {missing[0]}(); pass torchmetrics objects or a dict of them",
                    argument="metrics",
                )
            self._named[name] = metric.to(device) if callable(getattr(metric, "to", None)) else metric

    def __bool__(self) -> bool:
        return bool(self._named)

    def reset(self) -> None:
        """Forgets everything."""
        for metric in self._named.values():
            metric.reset()

    def update(self, outputs: Any) -> None:
        """Adds ``(prediction, target)`` of one batch."""
        prediction, target = outputs
        for metric in self._named.values():
            metric.update(prediction, target)

    def compute(self) -> Mapping[str, Any]:
        """Returns the values by name: numbers, and lists where a metric gives more than one."""
        values: dict[str, Any] = {}
        for name, metric in self._named.items():
            result = metric.compute()
            if isinstance(result, Mapping):
                inner = {"/".join(path): value for path, value in flatten_nested_dict(result).items()}
                values.update({key if name is None else f"{name}/{key}": value for key, value in inner.items()})
            else:
                values[_name_of(metric) if name is None else name] = result
        return {name: _plain(value) for name, value in values.items()}


def _name_of(metric: Any) -> str:
    """Returns ``accuracy`` for a MulticlassAccuracy, ``mean_squared_error`` for a MeanSquaredError."""
    word = re.sub(r"^(Binary|Multiclass|Multilabel)(?=[A-Z])", "", type(metric).__name__)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word).lower()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) and value.numel() != 1 else value
