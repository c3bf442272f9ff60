"""Few-label evaluation of representations by nearest-neighbour regression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import numpy as np
import numpy.typing as npt

_Float = npt.NDArray[np.float64]

SIZES = (20, 50, 100, 200, 500)
"""Numbers of labelled rows; the last uses all of them."""
HEADLINE = 100
"""Number of labelled rows of the headline figure."""
_FEW, _MANY = 3, 5  # neighbours below 100 labels, and from 100 on


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
    y = np.asarray(target, dtype=np.float64)
    pool, asked = (rows[np.isfinite(y[rows])] for rows in (np.asarray(train, np.intp), np.asarray(test, np.intp)))
    if len(pool) < _MANY or len(asked) == 0:
        raise ValueError(
            f"target is known for {len(pool)} training and {len(asked)} test rows, it must be known for at least "
            f"{_MANY} and 1: give more rows"
        )
    sizes = [size for size in sizes if _FEW <= size < len(pool)]
    rng = np.random.default_rng(seed)
    drawn = {size: [rng.choice(len(pool), size, replace=False) for _ in range(draws)] for size in sizes}
    drawn[len(pool)] = [np.arange(len(pool))]
    curves = {}
    for name, array in features.items():
        x = np.asarray(array, dtype=np.float64)
        far = _distances(x[asked], x[pool])
        errors = {size: [_error(far, y[pool], y[asked], rows) for rows in each] for size, each in drawn.items()}
        curves[name] = FewLabels(
            labels=list(errors),
            mae=[float(np.mean(each)) for each in errors.values()],
            standard_error=[_standard_error(each) for each in errors.values()],
            draws={str(size): each for size, each in errors.items()},
        )
    return curves


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
