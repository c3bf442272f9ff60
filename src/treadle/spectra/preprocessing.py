"""Preprocessing of spectra: SNV scaling and farthest-point sampling (and the augmenter of `treadle.spectra.augment`).

Shapes: N (or B) = rows, L = channels, K = selected rows. After SNV every row has mean 0 and norm sqrt(L - 1), so rows
are compared by angle.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from treadle.errors import ConfigError
from treadle.errors.arguments import check_argument, check_least, check_within, checked
from treadle.spectra.arrays import Spectra, as_array, as_float64, centre, device_of, like, per_row, take, write_into
from treadle.spectra.augment import SpectraAugmenter
from treadle.spectra.estimator import Estimator

_log = logging.getLogger("treadle.spectra")

__all__ = ["SNVScaler", "SpectraAugmenter", "cosine_fps_downsample", "pretreatments", "snv"]


class SNVScaler(Estimator):
    """Standard normal variate (SNV) scaling: each row minus its mean, divided by its standard deviation.

    y = (x - mean) / (std + eps) per row, with ddof 1 (0 for length 1), computed in float64 (Barnes, Dhanoa & Lister
    1989). The container, device and floating dtype of the input are preserved; integers give float32. Constant rows
    become exact zeros. Masked array entries are NaN. Nothing is learned from the data. Rows so faint that eps affects
    their scale cause a warning.

    Args:
        eps: Added to the standard deviation, at least 0.
        copy: False writes the result in place if the input is floating.
        transform_stats: True makes `transform` return ``(Y, mu, sd)``.

    Raises:
        ValueError: When ``eps`` is negative or NaN.

    Example:
        >>> import numpy as np
        >>> SNVScaler().transform(np.array([1.0, 2.0, 3.0]))
        array([-1.,  0.,  1.])
    """

    def __init__(self, eps: float = 1e-12, copy: bool = True, transform_stats: bool = False) -> None:
        check_argument("eps", eps, float)
        check_least(0, eps=eps)
        self.eps = eps
        self.copy = copy
        self.transform_stats = transform_stats

    _learns, _transforms = False, True

    def fit(self, X: object = None, y: object = None) -> SNVScaler:
        """Return self; a no-op for pipelines, but for sparse rows, which are refused."""
        as_array(X, "X")
        return self

    def fit_transform(self, X: Spectra, y: object = None) -> Any:
        """Call `transform`."""
        return self.transform(X)

    # Any, not a union: the constructor decides which of the two is returned, which no overload can express.
    def transform(self, X: Spectra) -> Any:
        """Scale every row.

        Args:
            X: (L,) or (N, L), NumPy, torch or a pandas table, real numbers. NaN stays within its row.

        Returns:
            Y like ``X``, or an array for a table; with ``transform_stats`` the tuple ``(Y, mu, sd)`` in the same
            container and dtype, mu and sd of shape (N, 1), or 0-d for one spectrum, sd = std + eps.

        Raises:
            TypeError: When ``X`` is neither a NumPy array nor a tensor.
            ValueError: When ``X`` is not real, is not 1-D or 2-D, or has no channels.
        """
        X = as_array(X, "X")
        work = as_float64(X, "X")
        if work.dim() not in (1, 2) or work.shape[-1] == 0:
            raise ValueError(
                f"X has shape {tuple(work.shape)} but must be (L,) or (N, L) with L of at least 1; reshape it to rows"
            )
        centred, mu, constant = centre(work)
        # Not Tensor.std: it warns for an empty batch, and its gradient at a constant row is NaN.
        norm = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
        std = norm / math.sqrt(max(work.shape[-1] - 1, 1))
        sd = torch.where(constant, 0.0, std) + self.eps
        self._warn_of_faint(int((~constant & (std < 100 * self.eps)).sum()), constant.numel())
        # With eps = 0 a constant row would be 0 / 0.
        Y = like(torch.where(constant, 0.0, centred / sd), X)
        if not self.copy and Y.dtype == X.dtype:
            Y = write_into(X, Y)
        if not self.transform_stats:
            return Y
        if work.dim() == 1:
            mu, sd = mu.squeeze(-1), sd.squeeze(-1)
        return Y, like(mu, X), like(sd, X)

    def _warn_of_faint(self, count: int, total: int) -> None:
        if count:
            _log.warning(
                "SNVScaler: %d of %d rows have a standard deviation below 100 eps (eps=%g), so it does not become 1: "
                "bring the spectra to another unit, or pass a smaller eps, such as eps=0.0",
                count, total, self.eps,
            )  # fmt: skip

    def inverse_transform(self, Y: Spectra, *, mu: Any, sd: Any) -> Spectra:
        """Invert `transform`: Y * sd + mu per row, computed in float64 and returned in the dtype of ``Y``.

        Args:
            Y: (L,) or (N, L) scaled spectra.
            mu: Row means as returned by `transform`; (N, 1), (N,) or a number.
            sd: Standard deviations plus eps, as returned by `transform`.

        Returns:
            The spectra in their original scale, like ``Y``.

        Raises:
            ValueError: When mu or sd do not have one value per row.

        Example:
            >>> import numpy as np
            >>> scaler = SNVScaler(transform_stats=True)
            >>> Y, mu, sd = scaler.transform(np.array([[1.0, 2.0, 3.0], [4.0, 6.0, 8.0]]))
            >>> scaler.inverse_transform(Y, mu=mu, sd=sd)
            array([[1., 2., 3.],
                   [4., 6., 8.]])
        """
        Y = as_array(Y, "Y")
        work = as_float64(Y, "Y")
        mu_column = per_row(mu, "mu", work)
        return like(work * per_row(sd, "sd", work) + mu_column, Y)


def snv(x: Spectra, eps: float = 1e-12) -> Spectra:
    """Scale every row to mean 0 and standard deviation 1, like :class:`SNVScaler`.

    Example:
        >>> import numpy as np
        >>> snv(np.array([1.0, 2.0, 3.0]))
        array([-1.,  0.,  1.])
    """
    scaled: Spectra = SNVScaler(eps).transform(x)
    return scaled


def pretreatments(spectra: ArrayLike) -> dict[str, NDArray[np.float64]]:
    """Return common chemometric pretreatments of spectra (N, L) by name, in the format of `KernelStack`.

    These are SNV, its first and second derivative, and SNV of the first and second derivative.

    Example:
        >>> import numpy as np
        >>> list(pretreatments(np.random.default_rng(0).normal(size=(3, 8))))
        ['snv', 'first of snv', 'second of snv', 'snv of first', 'snv of second']
    """
    plain = np.asarray(spectra, dtype=np.float64)
    scaled = np.asarray(snv(plain))
    views = {"snv": scaled}
    for name, order in (("first", 1), ("second", 2)):
        views[f"{name} of snv"] = _derivative(scaled, order)
    for name, order in (("first", 1), ("second", 2)):
        views[f"snv of {name}"] = np.asarray(snv(_derivative(plain, order)))
    return views


def _derivative(spectra: NDArray[np.float64], order: int) -> NDArray[np.float64]:
    for _ in range(order):
        spectra = np.gradient(spectra, axis=1)
    return spectra


@checked
def cosine_fps_downsample(
    X: NDArray[Any] | Tensor,
    *,
    ratio: float = 0.1,
    seed: int | None = None,
    init_index: int | None = None,
    return_numpy: bool = True,
    return_indices: bool = False,
    eps: float = 1e-12,
) -> Any:
    """Select rows far apart in angle by greedy farthest-point sampling.

    After the first row, each next one is the row with the largest minimum cosine distance to those already selected
    (Gonzalez 1985). k = min(max(1, round(N * ratio)), N), with Python's rounding of halves to even.

    Args:
        X: (N, L) finite rows, NumPy or torch; after SNV the distance depends only on the shape of spectra.
        ratio: Fraction of rows to keep, above 0.
        seed: Seed for drawing the first row; None uses torch's global CPU generator.
        init_index: Index of the first row, 0 to N - 1; None draws it.
        return_numpy: Return NumPy arrays; False returns tensors (on the device of ``X``).
        return_indices: Return ``(rows, indices)``.
        eps: Minimum norm of a row, so that a zero row has distance 1 from all others.

    Returns:
        (k, L) rows in their original scale and in order of selection; with ``return_indices`` also their (k,) int64
        indices, all distinct.

    Raises:
        TypeError: When ``X`` is neither a NumPy array nor a tensor.
        ValueError: When ``X`` is not 2-D with at least one row, is not finite, or a number is out of range.

    Example:
        >>> import numpy as np
        >>> X = np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
        >>> cosine_fps_downsample(X, ratio=0.7, init_index=0, return_indices=True)[1].tolist()
        [0, 2]
    """
    work_NL = as_float64(X, "X").detach()
    if work_NL.dim() != 2 or work_NL.shape[0] == 0:
        raise ValueError(f"X has shape {tuple(work_NL.shape)} but must be (N, L) with at least one row")
    if not bool(torch.isfinite(work_NL).all()):
        raise ValueError("X holds NaN or infinity, whose distance is undefined; drop or repair those rows first")
    check_within("(0, inf)", ratio=ratio)
    n_rows = work_NL.shape[0]
    if init_index is None:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        init_index = int(torch.randint(n_rows, (1,), generator=generator))
    elif not 0 <= init_index < n_rows:
        raise ConfigError(
            f"={init_index} must lie between 0 and {n_rows - 1}, the last row of X", argument="init_index"
        )
    count = min(max(1, round(n_rows * ratio)), n_rows)
    unit_NL = work_NL / torch.linalg.vector_norm(work_NL, dim=1, keepdim=True).clamp(min=eps)
    indices_K = _farthest_points(unit_NL, count=count, first=init_index).to(device_of(X))
    rows = take(X, indices_K, as_numpy=return_numpy)
    if not return_indices:
        return rows
    return rows, (indices_K.cpu().numpy() if return_numpy else indices_K)


def _farthest_points(unit_NL: Tensor, *, count: int, first: int) -> Tensor:
    """Run the greedy loop; the selected indices stay on the device, so nothing synchronises."""
    chosen_K = torch.empty(count, dtype=torch.int64, device=unit_NL.device)
    chosen_K[0] = first
    nearest_N = torch.full_like(unit_NL[:, 0], math.inf)
    for position in range(1, count):
        last_1 = chosen_K[position - 1 : position]
        distance_N = 1.0 - unit_NL @ unit_NL.index_select(0, last_1)[0]
        nearest_N = torch.minimum(nearest_N, distance_N)
        # A selected row must not be chosen again, even if only duplicates at distance 0 are left.
        nearest_N.index_fill_(0, last_1, -math.inf)
        chosen_K[position] = nearest_N.argmax()
    return chosen_K
