"""Epoch driver of the spectra trainer; records have the same keys with and without validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treadle.engine import Engine
from treadle.engine.best import BestRule
from treadle.faces.epochs import EpochTrainer


class SpectraEpochs(EpochTrainer):
    """Epoch driver whose records always contain every validation loss; None, as in the file, until it is measured.

    Args:
        engine: runs the steps.
        best: selects the best epoch and stops early; None does neither.
        losses: keys of the validation losses in a record.

    Example:
        >>> # epochs = SpectraEpochs(engine, best=BestRule("val_loss"))
    """

    def __init__(self, engine: Engine, *, best: BestRule | None = None, losses: Sequence[str] = ("val_loss",)):
        super().__init__(engine, best=best)
        self._losses = losses

    def train_record(self, means: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``train_loss``, and None for each validation loss."""
        return {**super().train_record(means), **dict.fromkeys(self._losses)}
