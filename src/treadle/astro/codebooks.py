"""Codebook fitting: quantile bins for scalars and k-means for vectors.

Shapes: N = values or vectors, D = their dimensions, K = bins or centroids.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from treadle.errors import ConfigError, MissingExtraError
from treadle.errors.arguments import check_least, checked


@checked
def quantile_bins(values: ArrayLike | Tensor, n_bins: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute quantile bins, each holding the same number of values.

    The bin of a value v is ``numpy.searchsorted(edges[1:-1], v, side="right")``. If more values are tied than a bin
    holds, edges coincide and the bins between them are empty.

    Args:
        values: numbers of any shape; NaN and infinities are ignored.
        n_bins: K, at least 1.

    Returns:
        ``edges`` (K + 1,), from the smallest value to the largest, and ``centers`` (K,), ascending: the mean of the
        values in the bin, which minimizes the squared error, or the midpoint of an empty bin.

    Raises:
        ConfigError: ``n_bins`` is below 1, or no value is finite.

    Example:
        >>> edges, centers = quantile_bins([1.0, 2.0, 10.0, float("nan"), 20.0], 2)
        >>> edges.tolist(), centers.tolist()
        ([1.0, 6.0, 20.0], [1.5, 15.0])
    """
    check_least(1, n_bins=n_bins)
    numbers = as_array(values, "values").astype(np.float64).ravel()
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        raise ConfigError(f"none of the {numbers.size} values is finite; bins need at least one", argument="values")
    edges = np.quantile(finite, np.linspace(0, 1, n_bins + 1))
    bins = np.searchsorted(edges[1:-1], finite, side="right")
    counts = np.bincount(bins, minlength=n_bins)
    low, high = edges[:-1], edges[1:]
    means = np.bincount(bins, weights=finite, minlength=n_bins) / np.maximum(counts, 1)
    # Rounding may push a mean out of its bin; keeping the centres ordered matters more than the last bit.
    centers = np.where(counts > 0, means.clip(low, high), low + (high - low) / 2)
    return edges, centers


@checked
def kmeans_codebook(x: ArrayLike | Tensor, k: int, *, seed: int = 0, max_iter: int = 50) -> NDArray[np.float32]:
    """Return k-means centroids of vectors, initialised with k-means++ (Arthur & Vassilvitskii 2007).

    The same data and seed give the same centroids to the bit; scikit-learn therefore runs on one thread, since the
    order in which its threads sum is undefined. It warns if there are fewer than k distinct vectors.

    Args:
        x: (N, D) finite vectors.
        k: K, at least 1 and at most N.
        seed: seed of the initialisation.
        max_iter: maximum number of Lloyd iterations.

    Returns:
        (K, D) float32.

    Raises:
        ConfigError: x is not (N, D) or not finite, or k is out of range.
        ImportError: scikit-learn is not installed.

    Example:
        >>> sorted(kmeans_codebook([[0.0], [1.0], [10.0], [12.0]], 2).ravel().tolist())
        [0.5, 11.0]
    """
    vectors_ND = as_array(x, "x").astype(np.float32)
    if vectors_ND.ndim != 2 or not np.isfinite(vectors_ND).all():
        raise ConfigError(f"x of shape {vectors_ND.shape}: must be (N, D) and finite in float32")
    check_least(1, max_iter=max_iter)
    check_least(0, seed=seed)
    if not 1 <= k <= len(vectors_ND):
        raise ConfigError(f"={k}: must be at least 1 and at most the {len(vectors_ND)} vectors of x", argument="k")
    try:
        from sklearn.cluster import KMeans
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise MissingExtraError(f"k-means needs scikit-learn ({error}): pip install 'treadle[astro]'") from error
    with threadpool_limits(limits=1):
        fitted = KMeans(n_clusters=k, n_init=1, max_iter=max_iter, random_state=seed).fit(vectors_ND)
    return np.asarray(fitted.cluster_centers_, dtype=np.float32)


def unmasked(values: Any) -> Any:
    """Fill the masked entries of a masked array with NaN; return anything else unchanged.

    Example:
        >>> unmasked(np.ma.masked_array([1, 2], mask=[False, True])).tolist()
        [1.0, nan]
    """
    return values.astype(np.float64).filled(np.nan) if np.ma.is_masked(values) else values


def as_array(values: ArrayLike | Tensor, name: str) -> NDArray[Any]:
    """Return real numbers as a NumPy array; masked numbers become NaN.

    Raises:
        ConfigError: the values are not real numbers.
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()  # NumPy has no bfloat16
    array = np.asarray(unmasked(values))
    if array.dtype.kind not in "fiu":
        raise ConfigError(f"{name} has dtype {array.dtype}: must hold real numbers; convert it with astype")
    return array
