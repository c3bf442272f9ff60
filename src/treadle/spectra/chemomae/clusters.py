"""Downsampling, silhouettes and elbow detection of chemomae."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, checked
from treadle.spectra import preprocessing
from treadle.spectra.arrays import take
from treadle.spectra.clustering.elbow import curvature_elbow
from treadle.spectra.clustering.silhouette import silhouette_samples_cosine
from treadle.spectra.clustering.vmf import vmf_log_normalizer

Rows = Tensor | NDArray[Any]


@checked
def cosine_fps_downsample(
    X: Rows,
    *,
    ratio: float = 0.1,
    seed: int | None = None,
    init_index: int | None = None,
    return_numpy: bool = True,
    return_indices: bool = False,
    eps: float = 1e-12,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Any:
    """Select rows far apart in angle, like `treadle.spectra.cosine_fps_downsample`.

    Also accepts an empty array, for which it returns no rows, and a ratio of 0, which selects one row.

    Args:
        X: (N, C).
        ratio: fraction of the rows, at least 0; at least one row is selected.
        seed: seed for drawing the first row.
        init_index: index of the first row; nothing is drawn then.
        return_numpy: False returns tensors.
        return_indices: return ``(rows, indices)``.
        eps: minimum norm.
        device: device for the computation; None uses that of a tensor, else the CPU.
        generator: generator for drawing the first row, on the device of the computation.

    Raises:
        ConfigError: a value is out of range, or both ``seed`` and ``generator`` are given.
    """
    if seed is not None and generator is not None:
        raise ConfigError("seed and generator exclude each other; give one", argument="generator")
    check_least(0, ratio=ratio)
    if X.ndim != 2:
        raise ValueError(f"X has shape {tuple(X.shape)} but must be (N, C)")
    count = len(X)
    home = X.device if isinstance(X, Tensor) else torch.device("cpu")
    where = home if device is None else torch.device(device)
    if not count:
        rows: Any = np.asarray(X) if return_numpy else torch.as_tensor(X)
        none: Any = np.empty(0, dtype=np.int64) if return_numpy else torch.empty(0, dtype=torch.int64)
        return (rows, none) if return_indices else rows
    if init_index is None:
        draws = torch.Generator(device=where).manual_seed(seed) if seed is not None else generator
        init_index = int(torch.randint(count, (1,), device=where, generator=draws))
    _, indices = preprocessing.cosine_fps_downsample(
        torch.as_tensor(X).to(where), ratio=min(ratio, 1.0) or 0.5 / count, init_index=init_index, return_numpy=False,
        return_indices=True, eps=eps,
    )  # fmt: skip
    chosen, numbers = _rows_at(X, indices.to(home), where, as_numpy=return_numpy)
    return (chosen, numbers) if return_indices else chosen


def _rows_at(X: Rows, indices: Tensor, where: torch.device, *, as_numpy: bool) -> tuple[Any, Any]:
    """Return rows and their indices, on the device of a tensor or, for an array, on the requested device."""
    rows = take(X, indices, as_numpy=as_numpy)
    if as_numpy:
        return rows, indices.cpu().numpy()
    if isinstance(X, Tensor):
        return rows, indices
    return torch.as_tensor(rows).to(where), indices.to(where)


@checked
def silhouette_samples_cosine_gpu(
    X: Rows,
    labels: Rows,
    *,
    device: torch.device | str | None = None,
    chunk: int | None = 1_000_000,
    dtype: torch.dtype = torch.float32,
    return_numpy: bool = True,
    eps: float = 1e-12,
) -> Any:
    """Return silhouettes like `treadle.spectra.silhouette_samples_cosine`; a zero row is at distance 1 from all others.

    Args:
        X: (N, D).
        labels: (N,) integers.
        device: None means CUDA, then MPS, then CPU.
        chunk: maximum number of rows on the device at once.
        dtype: dtype of a tensor result; the arithmetic is float64 (float32 on MPS).
        return_numpy: True returns a float32 array; False returns a tensor on the device.
        eps: norms up to this value count as zero.

    Raises:
        ValueError: there is only one cluster, there are as many clusters as rows, or the labels differ in length.

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> silhouette_samples_cosine_gpu(rows, torch.tensor([0, 0, 1, 1]), device="cpu").round(2).tolist()
        [0.9900000095367432, 0.9900000095367432, 0.9900000095367432, 0.9900000095367432]
    """
    rows = torch.as_tensor(X).to(dtype).double()
    zero = (torch.linalg.vector_norm(rows, dim=1) <= eps).nonzero().flatten()
    if len(zero):  # each gets its own direction, orthogonal to all others
        own = rows.new_zeros(len(rows), len(zero))
        own[zero, torch.arange(len(zero), device=rows.device)] = 1.0
        rows = torch.cat([rows.index_fill(0, zero, 0.0), own], dim=1)
    values = silhouette_samples_cosine(rows, labels, chunk=chunk, device=device)
    if return_numpy:
        return values.float().cpu().numpy()
    return values.to(dtype) if device is None else values.to(torch.device(device), dtype)


@checked
def silhouette_score_cosine_gpu(X: Rows, labels: Rows, *, return_numpy: bool = True, **settings: Any) -> Any:
    """Return the mean of :func:`silhouette_samples_cosine_gpu`: a float, or a tensor with ``return_numpy=False``."""
    values = silhouette_samples_cosine_gpu(X, labels, **{**settings, "return_numpy": False})
    mean = values.float().mean()
    return float(mean) if return_numpy else mean


def vmf_logC(d: int, kappa: float | Tensor) -> Tensor:
    """Return the log normaliser, like `treadle.spectra.vmf_log_normalizer`."""
    return vmf_log_normalizer(d, kappa)


def l2_normalize_rows(X: Tensor, eps: float = 1e-6) -> Tensor:
    """Scale rows to norm 1."""
    return F.normalize(X, dim=1, eps=eps)


def cosine_similarity(A: Tensor, B: Tensor) -> Tensor:
    """Return the cosines (N, M) between rows of norm 1."""
    return A @ B.T


def cosine_dissimilarity(A: Tensor, B: Tensor) -> Tensor:
    """Return 1 - cosine (N, M) between rows of norm 1."""
    return 1.0 - A @ B.T


@checked
def find_elbow_curvature(
    k_list: Sequence[int],
    inertia_list: Sequence[float],
    smooth: bool = True,
    window_length: int = 5,
    polyorder: int = 2,
) -> tuple[int, int, NDArray[np.float64]]:
    """Find the elbow of a curve by its curvature, like chemomae 0.1.

    Returns:
        (K, index, curvature at every point).

    Raises:
        ConfigError: there are fewer than three points, or an argument is out of range.
        ImportError: SciPy is not installed.
    """
    index, curvature = curvature_elbow(
        k_list, inertia_list, smooth=smooth, window_length=window_length, polyorder=polyorder
    )
    return int(k_list[index]), index, curvature


@checked
def plot_elbow_ckm(k_list: Sequence[int], inertias: Sequence[float], optimal_k: int, elbow_idx: int) -> None:
    """Plot inertia against K in a new pyplot figure, with the elbow marked."""
    _plot_elbow(k_list, inertias, optimal_k, elbow_idx, ("Number of Clusters (k)", "Mean Cosine Inertia", "inertia"))


@checked
def plot_elbow_vmf(
    k_list: Sequence[int], scores: Sequence[float], optimal_k: int, elbow_idx: int, criterion: str = "bic"
) -> None:
    """Plot BIC (``"bic"``) or mean negative log-likelihood (``"nll"``) against K in a new pyplot figure."""
    name = {"bic": "BIC (lower is better)", "nll": "Mean NLL (lower is better)"}.get(criterion.lower(), "Score")
    _plot_elbow(k_list, scores, optimal_k, elbow_idx, ("Number of Components (k)", name, "score"))


def _plot_elbow(
    k_list: Sequence[int], values: Sequence[float], best: int, index: int, names: tuple[str, str, str]
) -> None:
    import matplotlib.pyplot as plt

    x_name, y_name, short = names
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(k_list, values, "o-", label=y_name.split(" (")[0])
    axes.scatter(k_list[index], values[index], s=120, label=f"Elbow: k={best}, {short}={values[index]:.4f}")
    axes.axvline(best, linestyle="--", linewidth=1.5, alpha=0.7)
    axes.set(xlabel=x_name, ylabel=y_name)
    axes.legend(loc="best")
    figure.tight_layout()
