"""How well the type of a spectrum is known from few labelled ones, by neighbours in a representation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import numpy as np
import numpy.typing as npt

_Float = npt.NDArray[np.float64]

SIZES = (20, 50, 100, 200, 500)
"""Numbers of labelled rows; all of them come last."""
HEADLINE = 100
"""The number of labelled rows of the headline."""
_FEW, _MANY = 3, 5  # neighbours below 100 labels, and from there


class FewLabels(TypedDict):
    """Errors of a representation by the number of labels; plain numbers, ready for JSON."""

    labels: list[int]
    mae: list[float]
    """Mean over the draws of the mean absolute error on the test rows."""
    standard_error: list[float]
    """Of that mean, over the draws of the labelled rows; 0 where all are labelled."""
    draws: dict[str, list[float]]
    """The error of each draw, by the number of labels."""


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
    """Predict a number from few labelled rows, by the nearest of them in each representation.

    The mean of 3 neighbours (5 from 100 labels on), weighted by 1 / distance. Each draw of labelled rows is the same
    for every representation.

    Args:
        features: name -> (N, D) array.
        target: (N,) numbers, NaN where unknown; rows of unknown target are left out.
        train: rows that labels are drawn from.
        test: rows that are predicted; of other objects.
        sizes: numbers of labels; those that are not below the number of labelled training rows are left out, and all
            training rows are added as one draw.
        draws: how often labels are drawn.
        seed: decides the draws.

    Returns:
        name -> errors, in the order given.

    Raises:
        ValueError: fewer than 5 training rows or no test row has a target.

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
    """Return the mean of our error minus theirs over the draws that they share, and its standard error.

    Example:
        >>> one = {"labels": [9], "mae": [1.0], "standard_error": [0.1], "draws": {"9": [0.9, 1.1]}}
        >>> two = {"labels": [9], "mae": [1.5], "standard_error": [0.1], "draws": {"9": [1.4, 1.6]}}
        >>> [round(value, 3) for value in difference(one, two, 9)]
        [-0.5, 0.0]
    """
    paired = np.asarray(ours["draws"][str(labels)]) - np.asarray(theirs["draws"][str(labels)])
    return float(paired.mean()), _standard_error(paired.tolist())


def _error(far: _Float, known: _Float, asked: _Float, rows: npt.NDArray[np.intp]) -> float:
    """Return the mean absolute error where only ``rows`` of the pool are labelled; ``far`` is (asked, pool)."""
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
