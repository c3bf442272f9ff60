"""Imputation of hidden channels without a network: baselines for a masked autoencoder.

Shapes: M = training rows, N = rows, L = channels. Everything is fitted in float64 to training rows without gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from treadle.regression import KernelRegression, Setting
from treadle.spectra.arrays import check_complete

_Float = npt.NDArray[np.float64]
_Bool = npt.NDArray[np.bool_]

SHRINKAGES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""White noise added to the visible channels, as a fraction of the mean channel variance."""
RANKS = (2, 4, 8, 16, 32)
"""Numbers of principal components."""
NEIGHBOURS = (1, 3, 5, 10, 20)
"""Numbers of training spectra to average."""


class GaussianFill:
    """Imputation by the conditional mean of a Gaussian with the mean and covariance of the training rows.

    Args:
        train: (M, L) rows to fit to.
        shrinkage: assumed noise variance in the visible channels, as a fraction of the mean channel variance.

    Example:
        >>> line = np.arange(6.0)[:, None] * np.ones(3)
        >>> fill = GaussianFill(line, 1e-6)
        >>> fill(np.array([[2.0, 2.0, 0.0]]), np.array([[True, True, False]])).round(3).tolist()
        [[2.0, 2.0, 2.0]]
    """

    def __init__(self, train: npt.ArrayLike, shrinkage: float) -> None:
        rows = _complete(train)
        self.mean = rows.mean(axis=0)
        self.covariance = np.atleast_2d(np.cov(rows.T))
        self.noise = shrinkage * float(np.trace(self.covariance)) / len(self.mean)

    def __call__(self, x: npt.ArrayLike, visible: npt.ArrayLike) -> _Float:
        """Return the rows (N, L) with hidden channels filled in; ``visible`` is True where a channel is visible."""
        rows, seen = np.asarray(x, dtype=np.float64), np.asarray(visible)
        filled = np.where(seen, rows, self.mean)
        for mask, alike in _by_mask(seen):
            filled[np.ix_(alike, ~mask)] = self.hidden_means(rows[alike], mask)
        return filled

    def hidden_means(self, rows: _Float, mask: _Bool) -> _Float:
        """Return the means (N, H) of the H hidden channels of rows that share one ``mask`` (L,)."""
        among = self.covariance[np.ix_(mask, mask)] + self.noise * np.eye(int(mask.sum()))
        across = self.covariance[np.ix_(~mask, mask)]
        found = across @ np.linalg.solve(among, (rows[:, mask] - self.mean[mask]).T)
        return np.asarray(self.mean[~mask] + found.T)


class PcaFill:
    """Imputation by the least-squares fit of the visible channels in the space of the first principal components.

    Args:
        train: (M, L) rows to fit to.
        rank: number of components.

    Example:
        >>> line = np.arange(6.0)[:, None] * np.ones(3)
        >>> PcaFill(line, 1)(np.array([[2.0, 2.0, 0.0]]), np.array([[True, True, False]])).round(3).tolist()
        [[2.0, 2.0, 2.0]]
    """

    def __init__(self, train: npt.ArrayLike, rank: int) -> None:
        rows = _complete(train)
        self.mean = rows.mean(axis=0)
        self.components = np.linalg.svd(rows - self.mean, full_matrices=False)[2][:rank]

    def __call__(self, x: npt.ArrayLike, visible: npt.ArrayLike) -> _Float:
        """Return the rows (N, L) with hidden channels filled in; ``visible`` is True where a channel is visible."""
        rows, seen = np.asarray(x, dtype=np.float64), np.asarray(visible)
        filled = np.where(seen, rows, self.mean)
        for index, mask in enumerate(seen):
            weights = np.linalg.lstsq(self.components[:, mask].T, rows[index, mask] - self.mean[mask], rcond=None)[0]
            filled[index, ~mask] += weights @ self.components[:, ~mask]
        return filled


class NearestFill:
    """Imputation by the mean of the training rows nearest in the visible channels.

    Args:
        train: (M, L) rows to search.
        count: number of rows to average, at most all.

    Example:
        >>> line = np.arange(6.0)[:, None] * np.ones(3)
        >>> NearestFill(line, 1)(np.array([[2.1, 2.0, 0.0]]), np.array([[True, True, False]])).tolist()
        [[2.1, 2.0, 2.0]]
    """

    def __init__(self, train: npt.ArrayLike, count: int) -> None:
        self.rows = _complete(train)
        self.count = min(count, len(self.rows))

    def __call__(self, x: npt.ArrayLike, visible: npt.ArrayLike) -> _Float:
        """Return the rows (N, L) with hidden channels filled in; ``visible`` is True where a channel is visible."""
        rows, seen = np.asarray(x, dtype=np.float64), np.asarray(visible)
        filled: _Float = rows.copy()
        for index, mask in enumerate(seen):
            far = ((self.rows[:, mask] - rows[index, mask]) ** 2).sum(axis=1)
            nearest = np.argsort(far, kind="stable")[: self.count]
            filled[index, ~mask] = self.rows[nearest][:, ~mask].mean(axis=0)
        return filled


class KernelFill:
    """Imputation by a Gaussian conditional mean plus kernel regression of its residual on the visible channels.

    The regression is refitted for each mask, with one factorisation of an (M, M) matrix shared by all rows with that
    mask.

    Args:
        train: (M, L) rows to fit to.
        gaussian: fitted to the same rows.
        setting: kernel, width and noise.
        device: device of the matrices.

    Example:
        >>> rows = np.random.default_rng(0).uniform(-2, 2, size=(200, 1)) ** np.array([1, 1, 1, 2])
        >>> seen, gaussian = np.array([[True, True, True, False]]), GaussianFill(rows, 1e-6)
        >>> fill = KernelFill(rows, gaussian, Setting("Gaussian", 1.0, 1e-4))
        >>> [each([[1.5, 1.5, 1.5, 0.0]], seen)[0, 3].round(1).item() for each in (gaussian, fill)]
        [1.6, 2.2]
    """

    def __init__(
        self, train: npt.ArrayLike, gaussian: GaussianFill, setting: Setting, *, device: torch.device | str = "cpu"
    ) -> None:
        self.rows = _complete(train)
        self.gaussian, self.setting, self.device = gaussian, setting, device
        self._scale = self.rows.std(axis=0) + 1e-12

    def __call__(self, x: npt.ArrayLike, visible: npt.ArrayLike) -> _Float:
        """Return the rows (N, L) with hidden channels filled in; ``visible`` is True where a channel is visible."""
        rows, seen = np.asarray(x, dtype=np.float64), np.asarray(visible)
        filled = self.gaussian(rows, seen)
        for mask, alike in _by_mask(seen):
            if mask.all() or not mask.any():
                continue
            left = self.rows[:, ~mask] - self.gaussian.hidden_means(self.rows, mask)
            fitted = KernelRegression(self._seen(self.rows, mask), self._on_device(left), self.setting)
            filled[np.ix_(alike, ~mask)] += fitted.mean(self._seen(rows[alike], mask)).cpu().numpy()
        return filled

    def _seen(self, rows: _Float, mask: _Bool) -> Tensor:
        off = (rows[:, mask] - self.gaussian.mean[mask]) / self._scale[mask]
        return self._on_device(np.clip(off, -5, 5))

    def _on_device(self, values: _Float) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def _complete(train: npt.ArrayLike) -> _Float:
    rows = np.asarray(train, dtype=np.float64)
    check_complete(int((~np.isfinite(rows).all(axis=1)).sum()), len(rows))
    return rows


def _by_mask(seen: _Bool) -> Iterator[tuple[_Bool, npt.NDArray[np.intp]]]:
    """Yield each distinct mask (L,) with the rows that have it."""
    masks, which = np.unique(seen, axis=0, return_inverse=True)
    for index, mask in enumerate(masks):
        yield mask, np.flatnonzero(which.ravel() == index)


Fill = Callable[[npt.ArrayLike, npt.ArrayLike], _Float]


def masked_error(filled: npt.ArrayLike, x: npt.ArrayLike, visible: npt.ArrayLike) -> float:
    """Return the mean squared error over the hidden channels of all rows.

    Example:
        >>> masked_error([[0.0, 3.0]], [[9.0, 1.0]], np.array([[True, False]]))
        4.0
    """
    hidden = ~np.asarray(visible)
    return float(np.mean((np.asarray(filled, dtype=np.float64) - np.asarray(x, dtype=np.float64))[hidden] ** 2))


@dataclass(frozen=True)
class Chosen:
    """Selected fill, its setting, and its validation error."""

    fill: Fill
    setting: float
    error: float


def choose_fills(train: npt.ArrayLike, x: npt.ArrayLike, visible: npt.ArrayLike) -> dict[str, Chosen]:
    """Fit the three fills, each with the setting of lowest masked error on the validation rows.

    Args:
        train: (M, L) rows to fit to.
        x: (N, L) validation rows.
        visible: (N, L) bool, True = visible.

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
