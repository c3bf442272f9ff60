"""A custom task: it handles batches and losses, not loops, devices or files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from treadle import ConfigError, StepOutput

Batch = tuple[Tensor, Tensor]


class QuantileTask:
    """Task with the pinball loss of several quantiles of a scalar.

    Args:
        quantiles: each in (0, 1), ascending; the model has one output per quantile.
    """

    def __init__(self, quantiles: Sequence[float]):
        if not quantiles or list(quantiles) != sorted(quantiles) or not 0 < quantiles[0] <= quantiles[-1] < 1:
            raise ConfigError(f"quantiles={list(quantiles)!r}: must rise and lie between 0 and 1")
        self.quantiles = list(quantiles)

    def step(
        self,
        model: nn.Module,
        batch: Batch,
        totals: Mapping[str, float] | None = None,
        generator: torch.Generator | None = None,
    ) -> StepOutput:
        """Return the mean loss of a batch: inputs (B, L), targets (B,)."""
        inputs, targets = batch
        predicted_BQ = model(inputs)
        losses_B = self.losses(predicted_BQ, targets)
        inside = (targets >= predicted_BQ[:, 0]) & (targets <= predicted_BQ[:, -1])
        records = {"inside": inside.float().mean(), "losses": losses_B.detach().max()}
        return StepOutput(losses_B.mean(), records, weight=len(targets), num_samples=len(targets))

    def losses(self, predicted_BQ: Tensor, targets_B: Tensor) -> Tensor:
        """Return the loss of each sample, (B,)."""
        quantiles_Q = torch.tensor(self.quantiles, device=predicted_BQ.device)
        error_BQ = targets_B[:, None] - predicted_BQ
        return torch.maximum(quantiles_Q * error_BQ, (quantiles_Q - 1) * error_BQ).mean(1)
