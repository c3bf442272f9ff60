"""Initialisation: k-means++ by cosine distance, and random rows.

Shape suffixes: N rows, D columns, K centroids, T candidates, B rows of one block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._rows import UnitRows


def kmeans_plus_plus(rows: UnitRows, n_components: int, *, generator: torch.Generator) -> Tensor:
    """Choose (K, D) unit rows of X by k-means++ with the cosine distance 1 - cos as the weight.

    Each step draws 2 + ceil(log2 K) candidates and keeps the one that leaves the smallest total distance
    ("greedy" k-means++; Arthur and Vassilvitskii 2007, section 6). A single candidate misses one of six
    well-separated clusters in about four runs of ten.
    """
    first = torch.randint(rows.n, (1,), generator=generator, device="cpu")
    chosen = [rows.take(first)]
    nearest_N = _distances(rows, chosen[0])[:, 0]
    trials = 2 + math.ceil(math.log2(max(n_components, 2)))
    for _ in range(1, n_components):
        candidates_T = _draw(nearest_N, trials, generator=generator)
        points_TD = rows.take(candidates_T)
        left_NT = torch.minimum(_distances(rows, points_TD), nearest_N[:, None])
        best = int(left_NT.sum(dim=0).argmin())
        chosen.append(points_TD[best : best + 1])
        nearest_N = left_NT[:, best]
    return torch.cat(chosen)


def random_rows(rows: UnitRows, n_components: int, *, generator: torch.Generator) -> Tensor:
    """Draw (K, D) unit rows of X without replacement."""
    return rows.take(torch.randperm(rows.n, generator=generator, device="cpu")[:n_components])


def _draw(weights_N: Tensor, count: int, *, generator: torch.Generator) -> Tensor:
    """Draw `count` row indices with probability proportional to the weights (uniform if all are zero)."""
    cumulative_N = weights_N.cumsum(dim=0)
    uniform_T = torch.rand(count, generator=generator, dtype=torch.float64, device="cpu")
    total = float(cumulative_N[-1])
    if total <= 0.0:
        return (uniform_T * len(weights_N)).long().clamp(max=len(weights_N) - 1)
    # right=True skips rows of weight zero, which have the same cumulative sum as the row before.
    return torch.searchsorted(cumulative_N, uniform_T * total, right=True).clamp(max=len(weights_N) - 1)


def _distances(rows: UnitRows, points_TD: Tensor) -> Tensor:
    """Return 1 - cos between every row and each point, (N, T) float64 on the CPU; rounding noise becomes 0."""
    out_NT = torch.empty(rows.n, len(points_TD), dtype=torch.float64, device="cpu")
    noise = 16 * torch.finfo(rows.dtype).eps
    for part, block_BD in rows.blocks():
        distance_BT = 1.0 - block_BD @ points_TD.T
        out_NT[part] = torch.where(distance_BT < noise, torch.zeros_like(distance_BT), distance_BT).cpu()
    return out_NT
