"""Kernel regression on several views of the inputs, and mixture weights of predictions chosen on held-out rows.

A baseline for networks on small data sets, whose predictions can be mixed with the network's.

Shapes: N = training rows, M = other rows, F = features of a view, K = outputs, A = predictors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from treadle.errors import ConfigError
from treadle.errors.arguments import checked

_Float = npt.NDArray[np.float64]
Views = Mapping[str, npt.ArrayLike]

KERNELS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Gaussian": lambda far: (-far).exp(),
    "rational quadratic": lambda far: 1 / (1 + far),
    "Matern 5/2": lambda far: (1 + (5 * far).sqrt() + 5 * far / 3) * (-(5 * far).sqrt()).exp(),
    "Matern 3/2": lambda far: (1 + (3 * far).sqrt()) * (-(3 * far).sqrt()).exp(),
    "exponential": lambda far: (-far.sqrt()).exp(),
}
"""By name, of half the squared distance times the width: the stationary kernels of the textbooks."""
WIDTHS = tuple(float(width) for width in 10.0 ** np.arange(-3, 1.1, 0.5))
"""Factors of the squared distance, a mean over the inputs."""
NOISES = tuple(float(noise) for noise in 10.0 ** np.arange(-6, 0.1, 0.5))
"""Variances of the noise over that of the process."""
_FURTHEST, _MOST_ANSWERS = 5.0, 12


def mixing_shares(errors: npt.ArrayLike) -> _Float:
    """Return the non-negative weights (A,), summing to 1, that minimize the squared error of a mixture of predictions.

    Args:
        errors: (A, ...) errors of each predictor on rows that none was fitted to; at most 12 predictors.

    Raises:
        ConfigError: there are more than 12 predictors, or none, or an error is not finite.

    Example:
        >>> mixing_shares([[1.0, -1.0, 1.0, -1.0], [1.0, 1.0, -1.0, -1.0], [3.0, -3.0, 3.0, -3.0]]).round(2).tolist()
        [0.5, 0.5, 0.0]
    """
    each = np.asarray(errors, dtype=np.float64)
    count = len(each)
    if not 1 <= count <= _MOST_ANSWERS:
        raise ConfigError(f"has {count} answers, must have 1 to {_MOST_ANSWERS}", argument="errors")
    if not np.isfinite(each).all():
        raise ConfigError("must be finite; leave out the rows whose truth is missing", argument="errors")
    each = each.reshape(count, -1)
    products = each @ each.T
    ridge = 1e-10 * np.trace(products) / count or 1.0
    least, best = np.inf, np.full(count, 1 / count)
    for size in range(1, count + 1):
        for chosen in map(list, itertools.combinations(range(count), size)):
            among = products[np.ix_(chosen, chosen)] + ridge * np.eye(size)
            shares = np.linalg.solve(among, np.ones(size))
            shares /= shares.sum()
            error = float(shares @ among @ shares)
            if shares.min() >= 0 and error < least:
                least, best = error, np.zeros(count)
                best[chosen] = shares
    return best


class Predicted(NamedTuple):
    """Predicted means and standard deviations, in the units and shape of the fitted targets."""

    mean: _Float
    deviation: _Float


class Setting(NamedTuple):
    """Kernel of a regression by its name in `KERNELS`, with its width and noise."""

    kernel: str
    width: float
    noise: float


class KernelRegression:
    """Zero-mean Gaussian process in closed form.

    Args:
        x: (N, F) float64 inputs.
        y: (N, K) targets.
        setting: kernel, width and noise to use.

    Raises:
        torch.linalg.LinAlgError: the kernel matrix with noise is singular in float64.
    """

    def __init__(self, x: Tensor, y: Tensor, setting: Setting) -> None:
        self.x, self.setting = x, setting
        among = _near(setting.kernel, setting.width, _half_squared(x, x))
        self._lower = torch.linalg.cholesky(_noisy(among, setting.noise))
        self._weights = torch.cholesky_solve(y, self._lower)
        self._variance = (y * self._weights).sum(0) / len(y)

    def mean(self, x: Tensor) -> Tensor:
        """Return the means (M, K)."""
        return self._across(x) @ self._weights

    def deviation(self, x: Tensor) -> Tensor:
        """Return the standard deviations (M, K) of new measurements."""
        gain = torch.linalg.solve_triangular(self._lower, self._across(x).T, upper=False).square().sum(0)
        left = (1 + self.setting.noise - gain).clamp(min=self.setting.noise)
        deviation: Tensor = (left[:, None] * self._variance).sqrt()
        return deviation

    def left_out(self) -> tuple[Tensor, Tensor]:
        """Return leave-one-out errors (N, K) of the training rows, and their predicted standard deviations."""
        precision = torch.cholesky_inverse(self._lower).diagonal()[:, None]
        return -self._weights / precision, (self._variance / precision).sqrt()

    def _across(self, x: Tensor) -> Tensor:
        return _near(self.setting.kernel, self.setting.width, _half_squared(x, self.x))


def _near(kernel: str, width: float, far: Tensor) -> Tensor:
    found: Tensor = KERNELS[kernel](width * far)
    return found


def _noisy(among: Tensor, noise: float) -> Tensor:
    return among + noise * torch.eye(len(among), dtype=among.dtype, device=among.device)


def _half_squared(x: Tensor, other: Tensor) -> Tensor:
    far = x.square().sum(1)[:, None] + other.square().sum(1) - 2 * x @ other.T
    return far.clamp(min=0) / (2 * x.shape[1])


class _View:
    """Inputs standardized by the training rows and clipped at 5; missing values become the mean."""

    def __init__(self, name: str, train: npt.ArrayLike, device: torch.device | str) -> None:
        rows = np.asarray(train, dtype=np.float64)
        self.name, self.center, self.device = name, np.nan_to_num(np.nanmean(rows, axis=0)), device
        self.scale = np.nanstd(rows, axis=0) + 1e-12

    def of(self, views: Views, *, count: int | None = None, argument: str = "views") -> Tensor:
        """Return the rows of the views, checking that there are ``count``."""
        if self.name not in views:
            raise ConfigError(f"has no {self.name!r}; give the views that were fitted", argument=argument)
        x = np.asarray(views[self.name], dtype=np.float64)
        _check_rows(self.name, x, count, len(self.center), argument)
        return self(x)

    def __call__(self, x: npt.ArrayLike) -> Tensor:
        plain = np.nan_to_num((np.asarray(x, dtype=np.float64) - self.center) / self.scale)
        return torch.from_numpy(np.clip(plain, -_FURTHEST, _FURTHEST)).to(self.device)


def _check_rows(name: str, x: _Float, count: int | None, width: int | None, argument: str) -> None:
    """Raise ConfigError unless ``x`` has two dimensions and the given numbers of rows and columns; None allows any."""
    if x.ndim != 2 or (count is not None and len(x) != count) or (width is not None and x.shape[1] != width):
        wanted = f"({'N' if count is None else count}, {'F' if width is None else width})"
        why = "a row for each y" if width is None else "the columns that were fitted" if count is None else "as y"
        raise ConfigError(f"{name!r} has shape {x.shape}, must be {wanted}, {why}", argument=argument)


class KernelStack:
    """Mixture of kernel regressions, one for each view of the inputs.

    The setting of each minimizes the error on held-out rows, or the leave-one-out error on the training rows. The
    mixture weights, and one scale factor of all standard deviations, are chosen the same way.

    Args:
        views: (N, F) inputs by name, such as spectra and their derivatives; NaN marks missing values.
        y: (N,) or (N, K) finite targets. All outputs share settings and weights.
        held_out: views and ``y`` of other rows to choose settings on. Needed if several training rows belong to the
            same object.
        kernels: kernels to choose from, by their names in `KERNELS`.
        widths: widths to choose from.
        noises: noise levels to choose from.
        most: maximal number of training rows for choosing settings; the final regressions are fitted to all rows.
        device: device of the matrices.

    Raises:
        ConfigError: views and ``y`` do not match, ``y`` has one row or is not finite, or no noise level is large enough
            for a non-singular matrix.

    Attributes:
        settings: chosen settings, by view.
        shares: mixture weights, by view.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(60, 3))
        >>> stack = KernelStack({"plain": x, "squared": x**2}, np.tanh(x[:, 0]))
        >>> bool(abs(stack({"plain": x, "squared": x**2}).mean - np.tanh(x[:, 0])).max() < 0.1)
        True
    """

    @checked
    def __init__(
        self,
        views: Views,
        y: npt.ArrayLike,
        *,
        held_out: tuple[Views, npt.ArrayLike] | None = None,
        kernels: Sequence[str] = tuple(KERNELS),
        widths: Sequence[float] = WIDTHS,
        noises: Sequence[float] = NOISES,
        most: int = 1000,
        device: torch.device | str = "cpu",
    ) -> None:
        if not views:
            raise ConfigError("is empty, must name at least one table of inputs", argument="views")
        rows = np.asarray(y, dtype=np.float64)
        if not np.isfinite(rows).all():
            raise ConfigError("must be finite; leave out the rows whose y is missing", argument="y")
        if len(rows) < 2:
            raise ConfigError(f"has {len(rows)} row, must have 2 or more to choose settings on", argument="y")
        for name, table in views.items():
            _check_rows(name, np.asarray(table, dtype=np.float64), len(rows), None, "views")
        self._one = rows.ndim == 1
        self._center, self._scale = rows.mean(axis=0), rows.std() + 1e-12
        target = self._standardised(rows, device)
        held = None
        if held_out is not None:
            other_y = np.asarray(held_out[1], dtype=np.float64)
            if not np.isfinite(other_y).all():
                raise ConfigError("y must be finite; leave out the rows whose y is missing", argument="held_out")
            held = held_out[0], self._standardised(other_y, device)
        grid = [Setting(*each) for each in itertools.product(kernels, widths, noises)]
        self._views = {name: _View(name, x, device) for name, x in views.items()}
        self._fitted, errors, expected = {}, [], []
        for name, view in self._views.items():
            x = view(views[name])
            other = None
            if held is not None:
                other = view.of(held[0], count=len(held[1]), argument="held_out"), held[1]
            setting = _chosen(x[:most], target[:most], grid, other)
            fitted = self._fitted[name] = KernelRegression(x, target, setting)
            if other is None:
                off, deviation = fitted.left_out()
            else:
                off, deviation = fitted.mean(other[0]) - other[1], fitted.deviation(other[0])
            errors.append(off.cpu().numpy())
            expected.append(deviation.cpu().numpy())
        self.settings = {name: fitted.setting for name, fitted in self._fitted.items()}
        self.shares = dict(zip(views, mixing_shares(np.stack(errors)).tolist(), strict=True))
        off_mixed, deviation_mixed = self._mixed(errors, expected)
        unsure = deviation_mixed > 0  # excludes constant columns
        ratios = off_mixed[unsure] / deviation_mixed[unsure]
        self._factor = float(np.sqrt(np.mean(ratios**2))) if len(ratios) else 1.0

    def __call__(self, views: Views) -> Predicted:
        """Return predicted means and standard deviations of other rows, (M,) or (M, K) like ``y``.

        Raises:
            ConfigError: a fitted view is missing or has a different number of columns.
        """
        means, deviations = [], []
        for name, fitted in self._fitted.items():
            x = self._views[name].of(views)
            means.append(fitted.mean(x).cpu().numpy())
            deviations.append(fitted.deviation(x).cpu().numpy())
        mean, deviation = self._mixed(means, deviations)
        if self._one:
            mean, deviation = mean[:, 0], deviation[:, 0]
        return Predicted(self._center + self._scale * mean, self._scale * self._factor * deviation)

    def _standardised(self, y: _Float, device: torch.device | str) -> Tensor:
        return torch.from_numpy((y - self._center) / self._scale).reshape(len(y), -1).to(device)

    def _mixed(self, means: Sequence[_Float], deviations: Sequence[_Float]) -> tuple[_Float, _Float]:
        """Return mean and standard deviation of the mixture."""
        shares = np.array(list(self.shares.values()))[:, None, None]
        mean = (shares * np.stack(means)).sum(axis=0)
        variance = (shares * (np.stack(deviations) ** 2 + (np.stack(means) - mean) ** 2)).sum(axis=0)
        return mean, np.sqrt(variance)


def _chosen(x: Tensor, y: Tensor, grid: Sequence[Setting], held: tuple[Tensor, Tensor] | None) -> Setting:
    """Return the setting with the least squared error on held-out rows, or leave-one-out."""
    among = _half_squared(x, x)
    across = None if held is None else _half_squared(held[0], x)
    least, best = np.inf, None
    for (kernel, width), settings in itertools.groupby(grid, key=lambda each: each[:2]):
        near = _near(kernel, width, among)
        far = None if across is None else _near(kernel, width, across)
        for setting in settings:
            lower, failed = torch.linalg.cholesky_ex(_noisy(near, setting.noise))
            if failed:
                continue
            weights = torch.cholesky_solve(y, lower)
            if far is None or held is None:
                off = weights / torch.cholesky_inverse(lower).diagonal()[:, None]
            else:
                off = far @ weights - held[1]
            error = float(off.square().mean())
            if error < least:
                least, best = error, setting
    if best is None:
        raise ConfigError("leave every matrix singular in float64; add a larger one", argument="noises")
    return best


class NumberViews:
    """Views of a numeric table for `KernelStack`: the values, their ranks as normal scores, and both.

    Columns with missing values in the training rows get an indicator column.

    Args:
        train: (N, F) training rows; NaN marks missing values.

    Example:
        >>> views = NumberViews([[1.0, 5.0], [2.0, np.nan], [30.0, 7.0]])([[2.0, np.nan]])
        >>> {name: table.round(2).tolist() for name, table in views.items()}
        {'values': [[2.0, nan, 1.0]], 'ranks': [[0.0, nan, 1.0]], 'both': [[2.0, nan, 0.0, nan, 1.0]]}
    """

    @checked
    def __init__(self, train: npt.ArrayLike) -> None:
        rows = np.asarray(train, dtype=np.float64)
        self.known = [np.sort(column[np.isfinite(column)]) for column in rows.T]
        self.flagged = ~np.isfinite(rows).all(axis=0)

    def __call__(self, table: npt.ArrayLike) -> dict[str, _Float]:
        """Return the views of rows (M, F)."""
        rows = np.asarray(table, dtype=np.float64)
        ranks = np.full_like(rows, np.nan)
        for column, known in enumerate(self.known):
            places = sum(np.searchsorted(known, rows[:, column], side) for side in ("left", "right"))
            share = np.clip(places / (2 * max(1, len(known))), 0.004, 0.996)
            ranks[:, column] = torch.special.ndtri(torch.from_numpy(share)).numpy()
        ranks[~np.isfinite(rows)] = np.nan
        flags = (~np.isfinite(rows)).astype(np.float64)[:, self.flagged]
        parts = {"values": (rows,), "ranks": (ranks,), "both": (rows, ranks)}
        return {name: np.concatenate([*each, flags], axis=1) for name, each in parts.items()}
