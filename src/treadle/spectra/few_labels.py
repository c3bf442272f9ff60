"""Few-label evaluation of representations by nearest-neighbour regression, and of inputs by kernel regression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch

from treadle.regression import KernelRegression, Setting

_Float = npt.NDArray[np.float64]

SIZES = (20, 50, 100, 200, 500)
"""Numbers of labelled rows; the last uses all of them."""
HEADLINE = 100
"""Number of labelled rows of the headline figure."""
MOST_REGRESSED = 200
"""Largest number of labelled rows for kernel regression; beyond, 50 draws take too long."""
_FEW, _MANY = 3, 5  # neighbours below 100 labels, and from 100 on
_SETTINGS = [
    Setting(*each) for each in product(("exponential", "Matern 3/2", "Gaussian"), (0.01, 0.1, 1.0), (0.003, 0.03, 0.3))
]


class FewLabels(TypedDict):
    """Errors of a representation by number of labels, as plain JSON-compatible numbers."""

    labels: list[int]
    mae: list[float]
    """Mean over the draws of the mean absolute error on the test rows."""
    standard_error: list[float]
    """Standard error of that mean over the draws of labelled rows; 0 if all are labelled."""
    draws: dict[str, list[float]]
    """Error of each draw, by number of labels."""


def few_labels(
    features: Mapping[str, npt.ArrayLike],
    target: npt.ArrayLike,
    train: npt.ArrayLike,
    test: npt.ArrayLike,
    *,
    sizes: Sequence[int] = SIZES,
    draws: int = 50,
    seed: int = 0,
) -> dict[str, FewLabels]:
    """Evaluate nearest-neighbour regression from few labelled rows in each representation.

    Predictions are the mean of 3 neighbours (5 from 100 labels on), weighted by 1 / distance. Every representation uses
    the same draws of labelled rows.

    Args:
        features: name -> (N, D) array.
        target: (N,) values, NaN where unknown; such rows are left out.
        train: indices of rows from which labels are drawn.
        test: indices of rows to predict; of different objects.
        sizes: numbers of labels; only those below the number of labelled training rows are used, and all training rows
            are added as a single draw.
        draws: number of draws of labels.
        seed: seed of the draws.

    Returns:
        name -> errors, in the order given.

    Raises:
        ValueError: fewer than 5 training rows, or no test row, have a target.

    Example:
        >>> x = np.linspace(0, 10, 60)[:, None]
        >>> curve = few_labels({"x": x}, x[:, 0], np.arange(0, 60, 2), np.arange(1, 60, 2), sizes=[5, 20], draws=4)["x"]
        >>> curve["labels"], curve["mae"][0] > curve["mae"][2]
        ([5, 20, 30], True)
    """
    y, pool, asked = _known(target, train, test)
    drawn = _drawn(len(pool), sizes, draws, seed)
    curves = {}
    for name, array in features.items():
        x = np.asarray(array, dtype=np.float64)
        far = _distances(x[asked], x[pool])
        curves[name] = _curve(
            {size: [_error(far, y[pool], y[asked], rows) for rows in each] for size, each in drawn.items()}
        )
    return curves


def few_labels_regression(
    x: npt.ArrayLike,
    target: npt.ArrayLike,
    train: npt.ArrayLike,
    test: npt.ArrayLike,
    *,
    sizes: Sequence[int] = SIZES,
    draws: int = 50,
    seed: int = 0,
) -> FewLabels:
    """Evaluate kernel regression from few labelled rows, with settings chosen by leave-one-out error.

    The draws are those of `few_labels`, of at most `MOST_REGRESSED` rows.

    Args:
        x: (N, D) inputs.
        target: (N,) numbers, NaN where unknown; rows of unknown target are left out.
        train: rows that labels are drawn from.
        test: rows that are predicted; of other objects.
        sizes: numbers of labels, as those of `few_labels`.
        draws: how often labels are drawn.
        seed: decides the draws.

    Raises:
        ValueError: fewer than 5 training rows or no test row has a target.
    """
    y, pool, asked = _known(target, train, test)
    rows_of = np.asarray(x, dtype=np.float64)
    errors: dict[int, list[float]] = {}
    for size, each in _drawn(len(pool), sizes, draws, seed).items():
        if size <= MOST_REGRESSED:
            errors[size] = []
            for rows in each:
                predicted = _regressed(rows_of[pool[rows]], y[pool[rows]], rows_of[asked])
                errors[size].append(float(np.abs(predicted - y[asked]).mean()))
    return _curve(errors)


def _regressed(x: _Float, y: _Float, asked: _Float) -> _Float:
    """Return the numbers of the rows ``asked`` by the regression with the least leave-one-out error.

    The inputs have one scale, not one per channel: with few rows the latter costs more than it gains.
    """
    centre, mean = x.mean(axis=0), y.mean()
    scale = np.sqrt(np.mean((x - centre) ** 2)) + 1e-12
    known, other = (torch.from_numpy((rows - centre) / scale) for rows in (x, asked))
    target = torch.from_numpy(y - mean)[:, None]
    tried = (KernelRegression(known, target, setting) for setting in _SETTINGS)
    best = min(tried, key=lambda regression: float(regression.left_out()[0].square().mean()))
    return np.asarray(best.mean(other)[:, 0].numpy() + mean)


def _known(
    target: npt.ArrayLike, train: npt.ArrayLike, test: npt.ArrayLike
) -> tuple[_Float, npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the targets, and the training and test rows whose target is known."""
    y = np.asarray(target, dtype=np.float64)
    pool, asked = (rows[np.isfinite(y[rows])] for rows in (np.asarray(train, np.intp), np.asarray(test, np.intp)))
    if len(pool) < _MANY or len(asked) == 0:
        raise ValueError(
            f"target is known for {len(pool)} training and {len(asked)} test rows, but must be known for at least "
            f"{_MANY} and 1: give more rows"
        )
    return y, pool, asked


def _drawn(pool: int, sizes: Sequence[int], draws: int, seed: int) -> dict[int, list[npt.NDArray[np.intp]]]:
    """Return the labelled rows of each draw by their number, all rows last."""
    rng = np.random.default_rng(seed)
    drawn = {
        size: [rng.choice(pool, size, replace=False) for _ in range(draws)] for size in sizes if _FEW <= size < pool
    }
    drawn[pool] = [np.arange(pool)]
    return drawn


def _curve(errors: Mapping[int, list[float]]) -> FewLabels:
    return FewLabels(
        labels=list(errors),
        mae=[float(np.mean(each)) for each in errors.values()],
        standard_error=[_standard_error(each) for each in errors.values()],
        draws={str(size): each for size, each in errors.items()},
    )


def difference(ours: FewLabels, theirs: FewLabels, labels: int) -> tuple[float, float]:
    """Return the mean and standard error of our error minus theirs over the shared draws.

    Example:
        >>> one = {"labels": [9], "mae": [1.0], "standard_error": [0.1], "draws": {"9": [0.9, 1.1]}}
        >>> two = {"labels": [9], "mae": [1.5], "standard_error": [0.1], "draws": {"9": [1.4, 1.6]}}
        >>> [round(value, 3) for value in difference(one, two, 9)]
        [-0.5, 0.0]
    """
    paired = np.asarray(ours["draws"][str(labels)]) - np.asarray(theirs["draws"][str(labels)])
    return float(paired.mean()), _standard_error(paired.tolist())


def _error(far: _Float, known: _Float, asked: _Float, rows: npt.NDArray[np.intp]) -> float:
    """Return the mean absolute error if only ``rows`` of the pool are labelled; ``far`` is (asked, pool)."""
    near = far[:, rows]
    count = _FEW if len(rows) < HEADLINE else _MANY
    nearest = np.argpartition(near, count - 1, axis=1)[:, :count]
    weights = 1.0 / np.maximum(np.take_along_axis(near, nearest, axis=1), 1e-12)
    predicted = (known[rows][nearest] * weights).sum(axis=1) / weights.sum(axis=1)
    return float(np.abs(predicted - asked).mean())


def _distances(a: _Float, b: _Float) -> _Float:
    squared = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    distances: _Float = np.sqrt(np.maximum(squared, 0.0))
    return distances


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
