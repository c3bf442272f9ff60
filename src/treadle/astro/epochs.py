"""Epoch driver of the astronomy trainer, with the loss terms in its records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from treadle.astro.step_records import numbers_of
from treadle.engine import Engine
from treadle.faces.selection import SelectingEpochs
from treadle.means import RunningMeans
from treadle.task import add_output


class AstroEpochs(SelectingEpochs):
    """Epoch driver whose recorded means are each taken over their own count.

    Args:
        engine: runs the steps.
        weights: weights of the terms ``img``, ``sca`` and ``spec``; None for a user-supplied loss.
    """

    loss_name = "loss_total"

    def __init__(self, engine: Engine, weights: Mapping[str, float] | None):
        super().__init__(engine)
        self._weights = weights

    def train_epoch(self, loader: Iterable[Any]) -> dict[str, Any]:
        """Train one epoch without evaluation or selection; return its means."""
        self.prepare_alone()
        return numbers_of(super().train_epoch(loader), self._weights)

    def train_record(self, means: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``train_loss_total``, the terms and their counts."""
        return {f"train_{name}": value for name, value in numbers_of(means, self._weights).items()}

    def evaluate(self, loader: Iterable[Any]) -> dict[str, Any]:
        """Evaluate on a loader; return ``loss_total``, the terms and their counts.

        Raises:
            ConfigError: the loader is empty.
        """
        values = super().evaluate(loader)
        loss = values.pop("loss")
        return numbers_of({"loss": loss, "records": values}, self._weights)

    def step_numbers(self) -> dict[str, Any]:
        """Return the values of the current step, 0 for a term without positions; synchronises with the device."""
        means = RunningMeans()
        for output in self.engine.attempt.outputs:
            add_output(means, output)
        numbers = numbers_of(means.compute(), self._weights)
        counts = {f"loss_{name[2:]}": value for name, value in numbers.items() if name.startswith("n_")}
        return {name: value if counts.get(name, 1) else 0.0 for name, value in numbers.items()}
