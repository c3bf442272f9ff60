"""Baselines for graph models: the mean of the training targets, and ridge regression on summed node features.

Shapes: G = graphs, F = features, T = targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treadle.errors import ConfigError

__all__ = ["GraphTable", "mean_baseline", "ridge_baseline", "tabulate"]

_ALPHAS = tuple(10.0**power for power in range(-3, 4))


@dataclass(frozen=True)
class GraphTable:
    """Table of graphs with their targets."""

    sums_GF: Tensor
    """Node features summed over each graph, float64; for one-hot atom types, their counts."""
    num_nodes_G: Tensor
    targets_GT: Tensor
    """Float64."""


def tabulate(graphs: Iterable[Any], num_features: int) -> GraphTable:
    """Sum the node features of each graph; count integer ``x`` by type.

    Args:
        graphs: graphs with ``x`` and ``y``, a target or a row of targets per graph.
        num_features: number of types of integer ``x``.

    Example:
        >>> from types import SimpleNamespace
        >>> ring = SimpleNamespace(x=torch.tensor([0, 2, 2]), y=torch.tensor([[1.5]]))
        >>> tabulate([ring], num_features=3).sums_GF.tolist()
        [[1.0, 0.0, 2.0]]
    """
    sums, sizes, targets = [], [], []
    for graph in graphs:
        x = graph.x
        counts = x.sum(0) if x.is_floating_point() else torch.bincount(x.flatten(), minlength=num_features)
        sums.append(counts.double())
        sizes.append(len(x))
        targets.append(graph.y.double().flatten())
    return GraphTable(torch.stack(sums), torch.tensor(sizes), torch.stack(targets))


def mean_baseline(train_GT: Tensor, test_GT: Tensor) -> dict[str, float]:
    """Return the errors of predicting the mean training target; unknown targets (NaN) are ignored.

    Example:
        >>> mean_baseline(torch.tensor([[1.0], [3.0]]), torch.tensor([[2.5]]))
        {'mae': 0.5, 'rmse': 0.5}
    """
    return _errors(train_GT.double().nanmean(0), test_GT.double())


def ridge_baseline(
    features_GF: Sequence[Tensor], targets_GT: Sequence[Tensor], *, alphas: Sequence[float] = _ALPHAS
) -> dict[str, float]:
    """Return the test errors of ridge regression with its penalty selected by validation error.

    Features are standardised; the intercept is not penalised.

    Args:
        features_GF: features of the training, validation and test graphs.
        targets_GT: targets of the same.
        alphas: penalties to choose from, per graph.

    Returns:
        ``mae`` and ``rmse`` on the test set, ``alpha``, and ``num_features``, the number of non-constant features.

    Raises:
        ConfigError: a target is not finite.

    Example:
        >>> x = torch.arange(12.0).view(-1, 1)
        >>> found = ridge_baseline((x[:8], x[8:10], x[10:]), (2 * x[:8], 2 * x[8:10], 2 * x[10:]), alphas=[0.0])
        >>> round(found["mae"], 6)
        0.0
    """
    if not all(bool(targets.isfinite().all()) for targets in targets_GT):
        raise ConfigError("a target is not finite; a ridge needs all of them", argument="targets_GT")
    train = features_GF[0].double()
    varies = train.amax(0) > train.amin(0)
    centre, scale = train[:, varies].mean(0), train[:, varies].std(0)
    x_train, x_val, x_test = ((features.double()[:, varies] - centre) / scale for features in features_GF)
    y_train, y_val, y_test = (targets.double() for targets in targets_GT)
    gram, moment = x_train.T @ x_train / len(x_train), x_train.T @ (y_train - y_train.mean(0)) / len(x_train)

    def weights(alpha: float) -> Tensor:
        penalised = gram + alpha * torch.eye(len(gram), dtype=gram.dtype)
        # Columns may be linearly dependent, like the counts of elements and of degrees.
        solution: Tensor = torch.linalg.lstsq(penalised, moment, driver="gelsd").solution
        return solution

    def errors(alpha: float, x: Tensor, y: Tensor) -> dict[str, float]:
        return _errors(x @ weights(alpha) + y_train.mean(0), y)

    best = min(alphas, key=lambda alpha: errors(alpha, x_val, y_val)["mae"])
    return {**errors(best, x_test, y_test), "alpha": best, "num_features": len(gram)}


def _errors(predicted_GT: Tensor, target_GT: Tensor) -> dict[str, float]:
    error = (predicted_GT - target_GT)[~target_GT.isnan()]
    return {"mae": float(error.abs().mean()), "rmse": float(error.square().mean().sqrt())}
