"""Baselines for graph models: the mean of the training targets, and ridge regression on summed node features.

Shapes: G = graphs, F = features, T = targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treadle.errors import ConfigError

__all__ = ["GraphTable", "RidgePredictions", "mean_baseline", "ridge_baseline", "ridge_predictions", "tabulate"]

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

    Args:
        features_GF: features of the training, validation and test graphs.
        targets_GT: targets of the same; NaN is unknown and ignored.
        alphas: penalties to choose from, per graph.

    Returns:
        ``mae`` and ``rmse`` on the test set, ``alpha``, and ``num_features``, the number of non-constant features.

    Raises:
        ConfigError: a target has fewer than two known values in training, or none is known in validation.

    Example:
        >>> x = torch.arange(12.0).view(-1, 1)
        >>> found = ridge_baseline((x[:8], x[8:10], x[10:]), (2 * x[:8], 2 * x[8:10], 2 * x[10:]), alphas=[0.0])
        >>> round(found["mae"], 6)
        0.0
    """
    found = ridge_predictions(features_GF, targets_GT, alphas=alphas)
    errors = _errors(found.predicted_GT, targets_GT[2].double())
    return {**errors, "alpha": found.alpha, "num_features": found.num_features}


class RidgePredictions(NamedTuple):
    """Predictions of ridge regression for the test graphs."""

    predicted_GT: Tensor
    """Float64."""
    alpha: float
    """The penalty with the smallest validation error."""
    num_features: int
    """Number of features that are not constant in training."""


def ridge_predictions(
    features_GF: Sequence[Tensor], targets_GT: Sequence[Tensor], *, alphas: Sequence[float] = _ALPHAS
) -> RidgePredictions:
    """Predict the test graphs by one ridge regression per target; the arguments are those of `ridge_baseline`."""
    known_T = (~targets_GT[0].isnan()).sum(0)
    if int(known_T.min()) < 2 or bool(targets_GT[1].isnan().all()):
        raise ConfigError(
            f"{known_T.tolist()} known values in training and {int((~targets_GT[1].isnan()).sum())} in validation; a "
            "ridge needs two of each target and one",
            argument="targets_GT",
        )
    ridges = []
    for target_G in targets_GT[0].double().T:
        known_G = ~target_G.isnan()
        ridges.append(_Ridge(features_GF[0].double()[known_G], target_G[known_G]))

    def predict(part: int, alpha: float) -> Tensor:
        return torch.stack([ridge.predict(features_GF[part].double(), alpha) for ridge in ridges], 1)

    best = min(alphas, key=lambda alpha: _errors(predict(1, alpha), targets_GT[1].double())["mae"])
    return RidgePredictions(predict(2, best), best, max(ridge.num_features for ridge in ridges))


class _Ridge:
    """Ridge regression of one target on standardised features; the intercept is not penalised."""

    def __init__(self, features_GF: Tensor, target_G: Tensor) -> None:
        self._varies = features_GF.amax(0) > features_GF.amin(0)
        self.num_features = int(self._varies.sum())
        varying = features_GF[:, self._varies]
        self._centre, self._mean = varying.mean(0), target_G.mean()
        self._scale = ((varying - self._centre).square().sum(0) / (len(varying) - 1)).sqrt()
        x = (varying - self._centre) / self._scale
        self._gram, self._moment = x.T @ x / len(x), x.T @ (target_G - self._mean) / len(x)

    def predict(self, features_GF: Tensor, alpha: float) -> Tensor:
        if not self.num_features:
            return self._mean.expand(len(features_GF))
        x = (features_GF[:, self._varies] - self._centre) / self._scale
        penalised = self._gram + alpha * torch.eye(len(self._gram), dtype=self._gram.dtype)
        # Columns may be linearly dependent, like the counts of elements and of degrees.
        weights: Tensor = torch.linalg.lstsq(penalised, self._moment[:, None], driver="gelsd").solution
        return (x @ weights)[:, 0] + self._mean


def _errors(predicted_GT: Tensor, target_GT: Tensor) -> dict[str, float]:
    error = (predicted_GT - target_GT)[~target_GT.isnan()]
    return {"mae": float(error.abs().mean()), "rmse": float(error.square().mean().sqrt())}
