"""Choosing the number of clusters: elbow of a curve, and minimum BIC."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from treadle.errors import ConfigError
from treadle.errors.arguments import checked

from ._rows import DeviceLike, RowsLike, check_count
from .kmeans import CosineKMeans
from .vmf import VMFMixture

_LOGGER = logging.getLogger(__name__)


class _MakeKMeans(Protocol):
    def __call__(self, *, n_components: int, device: DeviceLike, random_state: int | None) -> CosineKMeans: ...


class _MakeMixture(Protocol):
    def __call__(self, *, n_components: int, device: DeviceLike, random_state: int | None) -> VMFMixture: ...


def chord_elbow(k_list: Sequence[int], values: Sequence[float]) -> tuple[int, float]:
    """Return the index of the elbow of a decreasing curve, and its distance to the chord.

    The curve is made non-increasing, then scaled to the unit square; the elbow maximises 1 - x - y, which
    is 0 on the chord from the first point to the last (Satopaa et al. 2011). A flat curve, or a single point,
    has no elbow: index 0 and distance 0.

    Example:
        >>> chord_elbow([1, 2, 3, 4, 5], [8.0, 2.0, 1.0, 0.5, 0.0])
        (1, 0.5)
    """
    distances = _chord_distances(k_list, values)
    index = max(range(len(distances)), key=distances.__getitem__)
    return index, distances[index]


def curvature_elbow(
    k_list: Sequence[int],
    values: Sequence[float],
    *,
    smooth: bool = True,
    window_length: int = 5,
    polyorder: int = 2,
) -> tuple[int, NDArray[np.float64]]:
    """Return the index of maximum curvature of a decreasing curve, and the curvature at every point.

    The curve is made non-increasing and scaled to the unit square. Derivatives come from a Savitzky-Golay filter if
    there are five evenly spaced points, else from finite differences. The end points have curvature -inf.

    Raises:
        ConfigError: there are fewer than three points, the lengths differ, a number is not finite, or the filter is out
            of range.
        ImportError: SciPy is not installed.

    Example:
        >>> curvature_elbow([1, 2, 3, 4, 5, 6, 7], [9.0, 5.0, 2.0, 1.5, 1.3, 1.2, 1.15])[0]
        3
    """
    x, y = np.asarray(k_list, dtype=float), np.asarray(values, dtype=float)
    if x.ndim != 1 or x.shape != y.shape or len(x) < 3 or not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ConfigError("must be a curve of at least 3 finite points, with one value for each K", argument="k_list")
    if (x <= 0).any() or (x != np.floor(x)).any() or (np.diff(x) <= 0).any():
        raise ConfigError("must be ascending whole numbers >= 1", argument="k_list", value=list(k_list))
    if window_length < 3 or window_length % 2 == 0 or not 2 <= polyorder < window_length:
        raise ConfigError(
            f"={window_length} must be odd and >= 3, and 2 <= polyorder={polyorder} < window_length",
            argument="window_length",
        )
    y = np.minimum.accumulate(y)
    x, y = ((axis - axis.min()) / (axis.max() - axis.min() + 1e-12) for axis in (x, y))
    if smooth and len(x) >= 5 and np.allclose(np.diff(x), x[1] - x[0], rtol=1e-9):
        from scipy.signal import savgol_filter

        width = min(window_length, len(x) - 1 + len(x) % 2)
        settings = {
            "window_length": width,
            "polyorder": min(polyorder, width - 1),
            "delta": float(np.median(np.diff(x))),
        }
        first, second = (savgol_filter(y, deriv=order, mode="interp", **settings) for order in (1, 2))
    else:
        first = np.gradient(y, x)
        second = np.gradient(first, x)
    curvature: NDArray[np.float64] = np.abs(second) / (1.0 + first**2) ** 1.5
    curvature[[0, -1]] = -np.inf
    return int(curvature.argmax()), curvature


@checked
def elbow_ckmeans(
    cluster_module: _MakeKMeans,
    X: RowsLike,
    device: DeviceLike = None,
    k_max: int = 50,
    chunk: int | None = None,
    verbose: bool = False,
    random_state: int | None = 42,
) -> tuple[list[int], list[float], int, int, float]:
    """Fit K = 1 ... k_max clusters and choose K at the elbow of the inertia.

    Args:
        cluster_module: `CosineKMeans`, or a callable with the same interface.
        X: (N, D) finite rows, none zero.
        device: device for blocks of rows; None selects CUDA, then MPS, then CPU.
        k_max: maximum number of clusters to try, at least 1; capped at N.
        chunk: maximum number of rows on the device at once.
        verbose: log each K at INFO level.
        random_state: seed of every fit.

    Returns:
        (k_list, inertias, K, index, score): K = k_list[index]; score is the distance to the chord, a float.

    Raises:
        ValueError: k_max is below 1, or `CosineKMeans.fit` rejects the rows.

    Example:
        >>> import torch
        >>> rows = torch.eye(3).repeat(10, 1) + 0.01 * torch.arange(90).reshape(30, 3).cos()
        >>> elbow_ckmeans(CosineKMeans, rows, "cpu", k_max=6)[2]
        3
    """

    def measure(k: int) -> float:
        model = cluster_module(n_components=k, device=device, random_state=random_state)
        return model.fit(X, chunk=chunk).inertia_

    k_list, inertias = _curve(measure, X, k_max=k_max, name="inertia", verbose=verbose)
    index, score = chord_elbow(k_list, inertias)
    return k_list, inertias, k_list[index], index, score


@checked
def elbow_vmf(
    cluster_module: _MakeMixture,
    X: RowsLike,
    device: DeviceLike = None,
    k_max: int = 50,
    chunk: int | None = None,
    verbose: bool = False,
    random_state: int | None = 42,
    criterion: Literal["bic", "nll"] = "bic",
) -> tuple[list[int], list[float], int, int, float]:
    """Fit mixtures of K = 1 ... k_max components and choose K by minimum BIC, or at the elbow of the mean NLL.

    Args:
        cluster_module: `VMFMixture`, or a callable with the same interface.
        X: (N, D) finite rows, none zero, D >= 2.
        device: device for blocks of rows; None selects CUDA, then MPS, then CPU.
        k_max: maximum number of components to try, at least 1; capped at N.
        chunk: maximum number of rows on the device at once.
        verbose: log each K at INFO level.
        random_state: seed of every fit.
        criterion: "bic" selects K = argmin BIC (Schwarz 1978); "nll" the elbow of -loglik / N. Lower is better for
            both; neither is negated.

    Returns:
        (k_list, scores, K, index, score): K = k_list[index]; score is the distance of that point to the
        chord of the curve, a float.

    Raises:
        ValueError: the criterion is unknown, k_max is below 1, or `VMFMixture.fit` rejects the rows.

    Example:
        >>> import torch
        >>> noise = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
        >>> elbow_vmf(VMFMixture, torch.eye(3).repeat(20, 1) + 0.05 * noise, "cpu", k_max=5)[2]
        3
    """

    def measure(k: int) -> float:
        model = cluster_module(n_components=k, device=device, random_state=random_state)
        model.fit(X, chunk=chunk)
        return model.bic(X, chunk=chunk) if criterion == "bic" else -model.loglik(X, chunk=chunk, average=True)

    k_list, scores = _curve(measure, X, k_max=k_max, name=criterion, verbose=verbose)
    if criterion == "nll":
        index, score = chord_elbow(k_list, scores)
    else:
        index = min(range(len(scores)), key=scores.__getitem__)
        score = _chord_distances(k_list, scores)[index]
    return k_list, scores, k_list[index], index, score


def _chord_distances(k_list: Sequence[int], values: Sequence[float]) -> list[float]:
    """Return 1 - x - y for every point of the curve (all 0 if it is flat)."""
    falling = list(accumulate(values, min))
    height = falling[0] - falling[-1]
    if height <= 0.0:
        return [0.0] * len(falling)
    width = k_list[-1] - k_list[0]
    return [
        float(1.0 - (k - k_list[0]) / width - (value - falling[-1]) / height)
        for k, value in zip(k_list, falling, strict=True)
    ]


def _curve(
    measure: Callable[[int], float], X: RowsLike, *, k_max: int, name: str, verbose: bool
) -> tuple[list[int], list[float]]:
    """Return K = 1 ... min(k_max, N) and `measure(K)` for each."""
    k_list = list(range(1, min(check_count("k_max", k_max), max(len(X), 1)) + 1))
    values = []
    for k in k_list:
        values.append(measure(k))
        if verbose:
            _LOGGER.info("K=%d %s=%.6g", k, name, values[-1])
    return k_list, values
