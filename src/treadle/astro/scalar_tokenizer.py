"""Scalar tokenizer with quantile bins for each table column.

Shapes: N = objects, C = columns, K = bins per column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treadle.astro.codebooks import quantile_bins, unmasked
from treadle.astro.tokenizers import Floats, Tokens, as_indices
from treadle.errors import ConfigError

MISSING = -1
"""Bin of a missing scalar."""


@dataclass(frozen=True, eq=False)
class ScalarTokenizer:
    """Tokenizer with separate quantile bins for each column of a table; any value may be missing.

    Attributes:
        columns: column names.
        edges: (C, K + 1), in each column's unit.
        centers: (C, K), the mean of the values in the bin.
        mean: (C,) mean of the fitted values.
        scale: (C,) standard deviation of the fitted values.

    Example:
        >>> tokenizer = ScalarTokenizer.fit([[1.0], [2.0], [10.0], [20.0], [np.nan]], ["mag"], 2)
        >>> tokenizer.encode([[1.5], [12.0], [np.nan]]).ravel().tolist()
        [0, 1, -1]
        >>> tokenizer.decode([[0], [1], [-1]]).ravel().tolist()
        [1.5, 15.0, nan]
    """

    columns: tuple[str, ...]
    edges: NDArray[np.float64]
    centers: NDArray[np.float64]
    mean: NDArray[np.float64]
    scale: NDArray[np.float64]

    @classmethod
    def fit(cls, table: ArrayLike, columns: Sequence[str], n_bins: int = 32) -> ScalarTokenizer:
        """Fit bins to the finite values of each column of a table (N, C); masked values are missing.

        Raises:
            ConfigError: the table is not (N, columns), a name is repeated, or a column has fewer than two distinct
                values.
        """
        values, names = np.asarray(unmasked(table), dtype=np.float64), tuple(columns)
        if values.ndim != 2 or values.shape[1] != len(names) or len(set(names)) != len(names):
            raise ConfigError(
                f"table of shape {values.shape} with the columns {names}: must be (N, columns), each once"
            )
        finite = np.where(np.isfinite(values), values, np.nan)
        present = np.isfinite(finite).sum(axis=0)
        empty = [name for name, count in zip(names, present, strict=True) if not count]
        if empty:
            raise ConfigError(f"the columns {', '.join(empty)} have no finite number; leave them out")
        mean, scale = np.nanmean(finite, axis=0), np.nanstd(finite, axis=0)
        if not (scale > 0).all():
            raise ConfigError(f"the column {names[int(scale.argmin())]} has one value only; leave it out")
        bins = [quantile_bins(column, n_bins) for column in finite.T]
        edges, centers = (np.stack(part) for part in zip(*bins, strict=True))
        return cls(names, edges, centers, mean, scale)

    @property
    def n_bins(self) -> int:
        """K, bins per column."""
        return int(self.centers.shape[1])

    @property
    def codebook(self) -> Floats:
        """(C, K) centres for the losses, each column standardised so that no unit outweighs another."""
        scaled = (self.centers - self.mean[:, None]) / self.scale[:, None]
        return np.asarray(scaled, dtype=np.float32)

    def encode(self, table: ArrayLike) -> Tokens:
        """Return the bins (N, C) of a table: -1 for masked or non-finite values, an end bin beyond the edges.

        Raises:
            ConfigError: the table has a different number of columns.
        """
        values = np.asarray(unmasked(table), dtype=np.float64)
        if values.ndim != 2 or values.shape[1] != len(self.columns):
            raise ConfigError(f"table of shape {values.shape}: must be (N, {len(self.columns)})")
        found = [
            np.searchsorted(edges[1:-1], column, side="right")
            for edges, column in zip(self.edges, values.T, strict=True)
        ]
        return np.where(np.isfinite(values), np.stack(found, axis=1), MISSING).astype(np.int64)

    def decode(self, bins: ArrayLike) -> NDArray[np.float64]:
        """Return the centres (N, C) of bins, NaN for -1."""
        table = np.asarray(bins)
        known = as_indices("bins", np.where(table == MISSING, 0, table), self.n_bins)
        return np.where(table == MISSING, np.nan, self.centers[np.arange(len(self.columns)), known])
