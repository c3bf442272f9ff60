"""How many clusters: the elbow of a curve, and the least BIC."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal, Protocol

from treadle.errors import ConfigError

from ._rows import DeviceLike, RowsLike, check_count
from .kmeans import CosineKMeans
from .vmf import VMFMixture

_LOGGER = logging.getLogger(__name__)


class _MakeKMeans(Protocol):
    def __call__(self, *, n_components: int, device: DeviceLike, random_state: int | None) -> CosineKMeans: ...


class _MakeMixture(Protocol):
    def __call__(self, *, n_components: int, device: DeviceLike, random_state: int | None) -> VMFMixture: ...


def chord_elbow(k_list: Sequence[int], values: Sequence[float]) -> tuple[int, float]:
    """Return the index of the elbow of a falling curve, and its distance to the chord.

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
        cluster_module: `CosineKMeans`, or anything called the same way.
        X: (N, D) finite rows, none zero.
        device: where blocks of rows are worked on; None means CUDA, then MPS, then CPU.
        k_max: most clusters tried, at least 1; never more than N.
        chunk: most rows on the device at once.
        verbose: log each K at level INFO.
        random_state: seed of every fit.

    Returns:
        (k_list, inertias, K, index, score): K = k_list[index]; score is the distance to the chord, a float.

    Raises:
        ValueError: k_max below 1, or rows that `CosineKMeans.fit` refuses.

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
    """Fit mixtures of K = 1 ... k_max components and choose K by least BIC, or at the elbow of the mean NLL.

    Args:
        cluster_module: `VMFMixture`, or anything called the same way.
        X: (N, D) finite rows, none zero, D >= 2.
        device: where blocks of rows are worked on; None means CUDA, then MPS, then CPU.
        k_max: most components tried, at least 1; never more than N.
        chunk: most rows on the device at once.
        verbose: log each K at level INFO.
        random_state: seed of every fit.
        criterion: "bic" takes K = argmin BIC (Schwarz 1978); "nll" the elbow of -loglik / N. Lower is better
            in both curves; neither is negated.

    Returns:
        (k_list, scores, K, index, score): K = k_list[index]; score is the distance of that point to the
        chord of the curve, a float.

    Raises:
        ValueError: another criterion, k_max below 1, or rows that `VMFMixture.fit` refuses.

    Example:
        >>> import torch
        >>> noise = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
        >>> elbow_vmf(VMFMixture, torch.eye(3).repeat(20, 1) + 0.05 * noise, "cpu", k_max=5)[2]
        3
    """
    if criterion not in ("bic", "nll"):
        raise ConfigError(' must be "bic" or "nll"; pass one of them.', argument="criterion", value=criterion)

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
    """Return 1 - x - y for every point of the curve (all 0 when it is flat)."""
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
    """Return K = 1 ... min(k_max, N) and `measure` of each."""
    k_list = list(range(1, min(check_count("k_max", k_max), max(len(X), 1)) + 1))
    values = []
    for k in k_list:
        values.append(measure(k))
        if verbose:
            _LOGGER.info("K=%d %s=%.6g", k, name, values[-1])
    return k_list, values
