"""Filling in hidden channels without a network: baselines of a masked autoencoder.

Shapes: M = training rows, N = rows, L = channels. All is fitted to complete training rows, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Float = npt.NDArray[np.float64]
_Bool = npt.NDArray[np.bool_]

SHRINKAGES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""White noise added to the visible channels, as a share of the mean variance of a channel."""
RANKS = (2, 4, 8, 16, 32)
"""Numbers of principal components."""
NEIGHBOURS = (1, 3, 5, 10, 20)
"""Numbers of training spectra that are averaged."""


class GaussianFill:
    """Conditional mean of the hidden channels, of a Gaussian with the mean and covariance of the training rows.

    Args:
        train: (M, L) rows to fit to.
        shrinkage: variance of the noise assumed in the visible channels, as a share of the mean variance of a channel.

    Example:
        >>> line = np.arange(6.0)[:, None] * np.ones(3)
        >>> fill = GaussianFill(line, 1e-6)
        >>> fill(np.array([[2.0, 2.0, 0.0]]), np.array([[True, True, False]])).round(3).tolist()
        [[2.0, 2.0, 2.0]]
    """

    def __init__(self, train: npt.ArrayLike, shrinkage: float) -> None:
        rows = np.asarray(train, dtype=np.float64)
        self.mean = rows.mean(axis=0)
        self.covariance = np.atleast_2d(np.cov(rows.T))
        self.noise = shrinkage * float(np.trace(self.covariance)) / len(self.mean)

    def __call__(self, x: npt.ArrayLike, visible: npt.ArrayLike) -> _Float:
        """Return the rows (N, L) with their hidden channels filled in; ``visible`` is True where they are seen."""
        rows, seen = np.asarray(x, dtype=np.float64), np.asarray(visible)
        filled = np.where(seen, rows, self.mean)
        for index, mask in enumerate(seen):
            among = self.covariance[np.ix_(mask, mask)] + self.noise * np.eye(int(mask.sum()))
            across = self.covariance[np.ix_(~mask, mask)]
            filled[index, ~mask] += across @ np.linalg.solve(among, rows[index, mask] - self.mean[mask])
        return filled


class PcaFill:
    """Point of the space of the first principal components that is nearest to the visible channels, by least squares.

    Args:
        train: (M, L) rows to fit to.
        rank: the number of components.

    Example:
        >>> line = np.arange(6.0)[:, None] * np.ones(3)
        >>> PcaFill(line, 1)(np.array([[2.0, 2.0, 0.0]]), np.array([[True, True, False]])).round(3).tolist()
        [[2.0, 2.0, 2.0]]
    """

    def __init__(self, train: npt.ArrayLike, rank: int) -> None:
        rows = np.asarray(train, dtype=np.float64)
        self.mean = rows.mean(axis=0)
        self.components = np.linalg.svd(rows - self.mean, full_matrices=False)[2][:rank]

    def __call__(self, x: npt.ArrayLike, visible: npt.ArrayLike) -> _Float:
        """Return the rows (N, L) with their hidden channels filled in; ``visible`` is True where they are seen."""
        rows, seen = np.asarray(x, dtype=np.float64), np.asarray(visible)
        filled = np.where(seen, rows, self.mean)
        for index, mask in enumerate(seen):
            weights = np.linalg.lstsq(self.components[:, mask].T, rows[index, mask] - self.mean[mask], rcond=None)[0]
            filled[index, ~mask] += weights @ self.components[:, ~mask]
        return filled


class NearestFill:
    """Mean of the training rows that are nearest in the channels that are seen.

    Args:
        train: (M, L) rows to take from.
        count: how many are averaged, at most all.

    Example:
        >>> line = np.arange(6.0)[:, None] * np.ones(3)
        >>> NearestFill(line, 1)(np.array([[2.1, 2.0, 0.0]]), np.array([[True, True, False]])).tolist()
        [[2.1, 2.0, 2.0]]
    """

    def __init__(self, train: npt.ArrayLike, count: int) -> None:
        self.rows = np.asarray(train, dtype=np.float64)
        self.count = min(count, len(self.rows))

    def __call__(self, x: npt.ArrayLike, visible: npt.ArrayLike) -> _Float:
        """Return the rows (N, L) with their hidden channels filled in; ``visible`` is True where they are seen."""
        rows, seen = np.asarray(x, dtype=np.float64), np.asarray(visible)
        filled: _Float = rows.copy()
        for index, mask in enumerate(seen):
            far = ((self.rows[:, mask] - rows[index, mask]) ** 2).sum(axis=1)
            nearest = np.argsort(far, kind="stable")[: self.count]
            filled[index, ~mask] = self.rows[nearest][:, ~mask].mean(axis=0)
        return filled


Fill = Callable[[npt.ArrayLike, npt.ArrayLike], _Float]


def masked_error(filled: npt.ArrayLike, x: npt.ArrayLike, visible: npt.ArrayLike) -> float:
    """Return the mean squared error over the hidden channels of all rows together.

    Example:
        >>> masked_error([[0.0, 3.0]], [[9.0, 1.0]], np.array([[True, False]]))
        4.0
    """
    hidden = ~np.asarray(visible)
    return float(np.mean((np.asarray(filled, dtype=np.float64) - np.asarray(x, dtype=np.float64))[hidden] ** 2))


@dataclass(frozen=True)
class Chosen:
    """A fill, the number that it was made with, and its error on the rows that the number was chosen on."""

    fill: Fill
    setting: float
    error: float


def choose_fills(train: npt.ArrayLike, x: npt.ArrayLike, visible: npt.ArrayLike) -> dict[str, Chosen]:
    """Fit the three fills, each with the setting that has the least masked error on rows that it was not fitted to.

    Args:
        train: (M, L) rows to fit to.
        x: (N, L) validation rows.
        visible: (N, L) bool, True where they are seen.

    Returns:
        ``gaussian``, ``pca`` and ``nearest``.

    Example:
        >>> rows = np.random.default_rng(0).normal(size=(40, 1)) * np.ones(6)
        >>> seen = np.arange(6) < 4
        >>> list(choose_fills(rows[:30], rows[30:], np.tile(seen, (10, 1))))
        ['gaussian', 'pca', 'nearest']
    """
    limit = min(np.shape(train))
    candidates: Mapping[str, tuple[Callable[[npt.ArrayLike, float], Fill], Sequence[float]]] = {
        "gaussian": (GaussianFill, SHRINKAGES),
        "pca": (lambda rows, rank: PcaFill(rows, int(rank)), [rank for rank in RANKS if rank <= limit] or [1]),
        "nearest": (lambda rows, count: NearestFill(rows, int(count)), NEIGHBOURS),
    }
    chosen = {}
    for name, (make, settings) in candidates.items():
        tried = [(setting, make(train, setting)) for setting in settings]
        errors = [masked_error(fill(x, visible), x, visible) for _, fill in tried]
        best = int(np.argmin(errors))
        chosen[name] = Chosen(tried[best][1], float(tried[best][0]), errors[best])
    return chosen
