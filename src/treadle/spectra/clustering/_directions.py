"""What the two estimators of directions share: their device, their width and the error before a fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treadle.errors import ConfigError
from treadle.spectra.estimator import Estimator, not_fitted

from ._rows import DeviceLike, RowsLike, UnitRows, resolve_device


class Directions(Estimator):
    """Estimator of K unit vectors (K, D), which works on rows block by block on one device."""

    _directions_KD: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where blocks of rows are worked on."""
        return self._device

    @device.setter
    def device(self, device: DeviceLike) -> None:
        self._device, self._device_given = resolve_device(device), device

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the settings by name, ``device`` as it was given."""
        return {**super().get_params(deep), "device": self._device_given}

    @property
    def n_features_in_(self) -> int:
        """Number of columns D that were fitted; RuntimeError before `fit`."""
        return self._fitted_directions().shape[1]

    def __sklearn_is_fitted__(self) -> bool:
        return self._directions_KD is not None

    def _fitted_directions(self) -> Tensor:
        if self._directions_KD is None:
            raise not_fitted(f"{type(self).__name__} is not fitted yet; call fit(X) or load a file first.")
        return self._directions_KD

    def _fitted_rows(self, X: RowsLike, chunk: int | None) -> UnitRows:
        """Return the rows of X, of the width that was fitted."""
        width = self.n_features_in_
        rows = UnitRows(X, device=self.device, chunk=chunk)
        if rows.d != width:
            name = type(self).__name__
            message = f"X has {rows.d} features, but {name} is expecting {width} features as input; fit it to such rows"
            raise ConfigError(message)
        return rows
