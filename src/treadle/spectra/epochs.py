"""The epochs of the spectra face: a record has the same keys with and without a validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.faces.epochs import EpochTrainer


class SpectraEpochs(EpochTrainer):
    """Writes ``val_loss`` into every record: None, as in the file, until a validation gives it.

    Example:
        >>> # epochs = SpectraEpochs(engine, best=BestRule("val_loss"))
    """

    def train_record(self, means: Mapping[str, Any]) -> dict[str, Any]:
        """Returns ``train_loss``, and ``val_loss`` as None."""
        return {**super().train_record(means), "val_loss": None}
