"""Selection of rows of the shipped data for a pack's command, and their split by object."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treadle.datasets.splits import Rows
from treadle.errors import ConfigError
from treadle.errors.arguments import check_least
from treadle.runs.settings import check_seeds


@dataclass
class DataConfig:
    """Settings for selecting rows and splitting their objects."""

    val_fraction: float = 0.1
    """Share of the objects for validation: it selects the best epoch."""
    test_fraction: float = 0.1
    """Share of the objects for the test: they are looked at once, at the end."""
    split_seed: int = 0
    """Decides which objects go where."""
    max_rows: int | None = None
    """Take about this many rows of a table, evenly spaced over it; None takes all."""

    def __post_init__(self) -> None:
        for name in ("val_fraction", "test_fraction"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError("must lie between 0 and 1", argument=f"data.{name}", value=getattr(self, name))
        if self.val_fraction + self.test_fraction >= 1:
            raise ConfigError(
                f" and data.test_fraction={self.test_fraction!r} leave nothing to train on: their sum must be below 1",
                argument="data.val_fraction",
                value=self.val_fraction,
            )
        check_seeds(data__split_seed=self.split_seed)
        check_least(10, data__max_rows=self.max_rows)

    def rows_of(self, count: int) -> Rows:
        """Return the indices of the rows to take from a table of ``count`` rows.

        Example:
            >>> DataConfig(max_rows=10).rows_of(100)[:3].tolist()
            [0, 11, 22]
        """
        if self.max_rows is None or self.max_rows >= count:
            return np.arange(count)
        return np.unique(np.linspace(0, count - 1, self.max_rows).round().astype(np.intp))
