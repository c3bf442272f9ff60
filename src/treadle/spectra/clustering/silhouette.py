"""Silhouettes under the cosine distance, in time N * K * D instead of N * N * D.

On unit rows the mean distance from x to a cluster is 1 - x . (sum of the cluster) / n, so the K sums replace
the N x N distances. Shape suffixes: N rows, D columns, K clusters, B rows of one block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from treadle.errors.arguments import checked

from ._rows import DeviceLike, RowsLike, UnitRows, as_tensor, one_hot, resolve_device


@checked
def silhouette_samples_cosine(
    X: RowsLike, labels: RowsLike | Sequence[int], *, chunk: int | None = None, device: DeviceLike = None
) -> Tensor:
    """Return the silhouette (b - a) / max(a, b) of every row under the distance 1 - cos.

    a is the mean distance to the other rows of its cluster, b the smallest mean distance to another cluster (Rousseeuw
    1987). A row alone in its cluster has 0. Agrees with scikit-learn's `metric="cosine"` to 1e-5.

    Args:
        X: (N, D) finite rows, none zero.
        labels: (N,) integers; they need not be consecutive.
        chunk: maximum number of rows on the device at once.
        device: device for blocks of rows; None uses that of a tensor on an accelerator, else CUDA, then MPS, then CPU.

    Returns:
        (N,) in [-1, 1], in the dtype of X (at least float32), on the device of X (the CPU for an array).

    Raises:
        ValueError: there is only one cluster, there are as many clusters as rows, or the labels differ in length.

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> [round(value, 2) for value in silhouette_samples_cosine(rows, [0, 0, 1, 1]).tolist()]
        [0.99, 0.99, 0.99, 0.99]
    """
    # Tensors on an accelerator are processed there; everything else follows the rule for device=None.
    on_device = isinstance(X, Tensor) and X.device.type != "cpu"
    where = X.device if isinstance(X, Tensor) and on_device and device is None else resolve_device(device)
    rows = UnitRows(X, device=where, chunk=chunk)
    codes_N, n_clusters = _check_labels(labels, rows.n)
    codes_N = codes_N.to(rows.device)
    counts_K = torch.bincount(codes_N, minlength=n_clusters).to(rows.dtype)
    sums_KD = torch.zeros(n_clusters, rows.d, dtype=rows.dtype, device=rows.device)
    for part, block_BD in rows.blocks():
        sums_KD += one_hot(codes_N[part], n_clusters, dtype=rows.dtype).T @ block_BD
    out_N = torch.empty(rows.n, dtype=rows.out_dtype, device=rows.home)
    noise = 16 * torch.finfo(rows.dtype).eps
    for part, block_BD in rows.blocks():
        own_B1 = codes_N[part, None]
        total_BK = counts_K - block_BD @ sums_KD.T  # summed distances to each cluster
        own_size_B = counts_K[codes_N[part]]
        within_B = total_BK.gather(1, own_B1).squeeze(1) / (own_size_B - 1).clamp(min=1)
        mean_BK = (total_BK / counts_K).scatter_(1, own_B1, float("inf"))
        between_B = mean_BK.amin(dim=1).clamp(min=0.0)
        within_B = within_B.clamp(min=0.0)
        largest_B = torch.maximum(within_B, between_B)
        value_B = (between_B - within_B) / largest_B.clamp(min=noise)
        # Distances between identical rows are rounding noise; 0 / 0 counts as 0, as in scikit-learn.
        value_B = torch.where((own_size_B > 1) & (largest_B > noise), value_B, torch.zeros_like(value_B))
        out_N[part] = value_B.to(rows.home, rows.out_dtype)
    return out_N


@checked
def silhouette_score_cosine(
    X: RowsLike, labels: RowsLike | Sequence[int], *, chunk: int | None = None, device: DeviceLike = None
) -> float:
    """Return the mean of `silhouette_samples_cosine` over all rows: a float in [-1, 1].

    Arguments and errors are those of `silhouette_samples_cosine`.

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> round(silhouette_score_cosine(rows, [0, 0, 1, 1]), 2)
        0.99
    """
    return float(silhouette_samples_cosine(X, labels, chunk=chunk, device=device).double().mean())


def _check_labels(labels: RowsLike | Sequence[int], n_rows: int) -> tuple[Tensor, int]:
    """Return K and labels renumbered to 0..K-1; raise ValueError unless 2 <= K <= N - 1 (scikit-learn's rule)."""
    labels_N = as_tensor(labels)
    if labels_N.ndim != 1 or len(labels_N) != n_rows:
        raise ValueError(f"labels has shape {tuple(labels_N.shape)}, but must be ({n_rows},): one per row of X.")
    if labels_N.is_floating_point() or labels_N.is_complex():
        raise ValueError(f"labels has dtype {labels_N.dtype}, but must hold integers; convert it with .long().")
    values, codes_N = torch.unique(labels_N, return_inverse=True)
    if not 2 <= len(values) <= n_rows - 1:
        raise ValueError(
            f"labels hold {len(values)} clusters for {n_rows} rows, but a silhouette needs at least 2 and at "
            "most N - 1; cluster again with another number of clusters."
        )
    return codes_N, len(values)
