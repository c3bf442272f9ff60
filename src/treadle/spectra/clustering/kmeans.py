"""Cosine (spherical) k-means.

Shape suffixes: N rows, D columns, K centroids, B rows of one block.
"""

from __future__ import annotations

import os
from typing import Literal, overload

import numpy as np
import torch
from torch import Tensor

from treadle.errors import ConfigError
from treadle.errors.arguments import check_argument, check_least

from ._directions import Directions
from ._rows import (
    DeviceLike,
    RowsLike,
    UnitRows,
    assign_and_sum,
    check_count,
    compute_dtype,
    make_generator,
    unit_rows,
)
from ._seeding import kmeans_plus_plus
from ._store import load_plain, save_atomic

_KIND = "treadle.spectra.CosineKMeans"
_EXACT = 1e-12  # below this mean distance, every row coincides with its centroid


class CosineKMeans(Directions):
    """Spherical k-means, which minimises J = mean(1 - cos(row, its centroid)).

    Initialised with k-means++ by cosine distance; a centroid is the normalised mean of its rows; an empty cluster takes
    the row farthest from its centroid; iteration stops at |dJ| < tol * |J| or |dJ| < tol * 1e-3 (Dhillon and Modha
    2001). Arithmetic is float64 (float32 on MPS).

    Args:
        n_components: number of clusters K, at least 1 and at most N.
        tol: tolerance of the stopping rule, >= 0.
        max_iter: maximum number of iterations, at least 1.
        device: device for blocks of rows; None selects CUDA, then MPS, then CPU.
        random_state: seed of a private generator; the global generators are not touched.

    Attributes:
        centroids: (K, D) unit rows on the device, in the dtype of X (at least float32); set by `fit`.
        inertia_: J of these exact centroids on the rows passed to `fit`.
        n_iter_: number of iterations; set by `fit`.

    Raises:
        ValueError: a count is below 1, tol is negative, a row is zero or not finite, or K > N.

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])
        >>> labels = CosineKMeans(2, device="cpu").fit_predict(rows)
        >>> bool(labels[0] == labels[1]), bool(labels[0] == labels[2])
        (True, False)
    """

    def __init__(
        self,
        n_components: int = 8,
        tol: float = 1e-4,
        max_iter: int = 500,
        device: DeviceLike = None,
        random_state: int | None = 42,
    ) -> None:
        self.n_components = check_count("n_components", n_components)
        check_argument("tol", tol, float)
        check_least(0, tol=tol)
        self.tol = float(tol)
        self.max_iter = check_count("max_iter", max_iter)
        self.device = device
        self.random_state = random_state

    @property
    def centroids(self) -> Tensor:
        """(K, D) unit rows; raises RuntimeError before `fit` or `load_centroids`."""
        return self._fitted_directions()

    def fit(self, X: RowsLike, chunk: int | None = None, *, y: object = None) -> CosineKMeans:
        """Fit the centroids to X (N, D), with at most `chunk` rows on the device at once; return self.

        Targets, which scikit-learn passes as the second argument, are ignored.
        """
        chunk = None if np.ndim(chunk) else chunk  # type: ignore[arg-type]
        rows = UnitRows(X, device=self.device, chunk=chunk)
        if self.n_components > rows.n:
            raise ConfigError(
                f"={self.n_components} must be at most the number of rows, N={rows.n}; "
                "ask for fewer clusters or pass more rows.",
                argument="n_components",
            )
        centroids_KD = kmeans_plus_plus(rows, self.n_components, generator=make_generator(self.random_state))
        before = float("inf")
        for iteration in range(1, self.max_iter + 1):
            inertia, sums_KD, counts_K = assign_and_sum(rows, centroids_KD)
            empty_K = counts_K == 0
            change = abs(before - inertia)
            still = change < self.tol * abs(inertia) or change < self.tol * 1e-3
            self.n_iter_ = iteration
            # Stopping here keeps the centroids for which `inertia` was computed. An empty cluster is filled before
            # stopping, unless there are fewer distinct rows than clusters.
            if still and (inertia <= _EXACT or not bool(empty_K.any())):
                break
            before = inertia
            centroids_KD = _update(centroids_KD, sums_KD, counts_K)
            if bool(empty_K.any()):
                centroids_KD[empty_K] = _farthest_rows(rows, centroids_KD, empty_K)
        self._directions_KD = centroids_KD.to(rows.out_dtype)
        # Computed again, since the last update (at max_iter) and the dtype of the result both affect it.
        self.inertia_ = assign_and_sum(rows, unit_rows(self._directions_KD, device=self.device))[0]
        return self

    @overload
    def predict(self, X: RowsLike, return_dist: Literal[False] = False, chunk: int | None = None) -> Tensor: ...

    @overload
    def predict(self, X: RowsLike, return_dist: Literal[True], chunk: int | None = None) -> tuple[Tensor, Tensor]: ...

    @overload
    def predict(self, X: RowsLike, return_dist: bool, chunk: int | None = None) -> Tensor | tuple[Tensor, Tensor]: ...

    def predict(
        self, X: RowsLike, return_dist: bool = False, chunk: int | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the index of the nearest centroid of each row, and with `return_dist` all distances.

        Args:
            X: (N, D) rows, D as fitted.
            return_dist: also return 1 - cos to every centroid, (N, K), in [0, 2].
            chunk: maximum number of rows on the device at once.

        Returns:
            labels (N,) int64, or (labels, distances), on the device of X.
        """
        rows = self._fitted_rows(X, chunk)
        centroids_KD = unit_rows(self.centroids, device=self.device)
        labels_N = torch.empty(rows.n, dtype=torch.int64, device=rows.home)
        width = len(centroids_KD) if return_dist else 0
        distances_NK = torch.empty(rows.n, width, dtype=rows.out_dtype, device=rows.home)
        for part, block_BD in rows.blocks():
            cosine_BK = block_BD @ centroids_KD.T
            labels_N[part] = cosine_BK.argmax(dim=1).to(rows.home)
            if return_dist:
                distances_NK[part] = (1.0 - cosine_BK).clamp(0.0, 2.0).to(rows.home, rows.out_dtype)
        return (labels_N, distances_NK) if return_dist else labels_N

    def fit_predict(self, X: RowsLike, chunk: int | None = None, *, y: object = None) -> Tensor:
        """Fit X (N, D) and return its labels (N,), like `fit` followed by `predict`."""
        return self.fit(X, chunk).predict(X, chunk=None if np.ndim(chunk) else chunk)  # type: ignore[arg-type]

    def score(self, X: RowsLike, y: object = None) -> float:
        """Return the negative mean of 1 - cos between the rows of X (N, D) and their centroids; higher is better."""
        rows = self._fitted_rows(X, None)
        return -float(assign_and_sum(rows, unit_rows(self.centroids, device=self.device))[0])

    def save_centroids(self, path: str | os.PathLike[str]) -> None:
        """Save the centroids and their inertia to `path` atomically."""
        payload = {"kind": _KIND, "centroids": self.centroids.cpu().contiguous(), "inertia": self.inertia_}
        save_atomic(payload, path)

    def load_centroids(self, path: str | os.PathLike[str], strict_k: bool = True) -> CosineKMeans:
        """Load the centroids saved at `path`; return self.

        Args:
            path: a file written by `save_centroids`, here or in chemomae.
            strict_k: True rejects a file whose K differs from `n_components`; False adopts its K.

        Raises:
            ValueError: the file is of another kind, the centroids are not finite (K, D), or K differs with `strict_k`.
        """
        payload = load_plain(path, kind=_KIND, keys=("centroids", "inertia"), chemomae={"inertia": "inertia_"})
        centroids_KD = payload["centroids"]
        if centroids_KD.ndim != 2 or not bool(torch.isfinite(centroids_KD).all()):
            raise ConfigError(
                f"centroids of shape {tuple(centroids_KD.shape)} must be a finite "
                "(K, D) matrix; write the file again with save_centroids.",
                argument="path",
                value=os.fspath(path),
            )
        if strict_k and len(centroids_KD) != self.n_components:
            raise ConfigError(
                f"={self.n_components}, but {os.fspath(path)!r} holds {len(centroids_KD)} "
                "centroids and strict_k=True requires the same; pass strict_k=False to take over the file's.",
                argument="n_components",
            )
        self.n_components = len(centroids_KD)
        if compute_dtype(self.device) == torch.float32:
            centroids_KD = centroids_KD.float()
        self._directions_KD = centroids_KD.to(self.device)
        self.inertia_ = float(payload["inertia"])
        return self


def _update(centroids_KD: Tensor, sums_KD: Tensor, counts_K: Tensor) -> Tensor:
    """Return the normalised means; a centroid without rows, or whose rows cancel, is unchanged."""
    length_K1 = torch.linalg.vector_norm(sums_KD, dim=1, keepdim=True)
    usable_K1 = length_K1 > 1e-12 * counts_K[:, None]
    return torch.where(usable_K1, sums_KD / length_K1.clamp(min=1e-300), centroids_KD)


def _farthest_rows(rows: UnitRows, centroids_KD: Tensor, empty_K: Tensor) -> Tensor:
    """Return one row per empty cluster: the rows farthest from their nearest non-empty centroid."""
    kept_KD = centroids_KD[~empty_K]
    distance_N = torch.empty(rows.n, dtype=torch.float64, device="cpu")
    for part, block_BD in rows.blocks():
        distance_N[part] = (1.0 - (block_BD @ kept_KD.T).amax(dim=1)).to("cpu", torch.float64)
    return rows.take(torch.topk(distance_N, int(empty_K.sum())).indices)
