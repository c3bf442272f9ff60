"""The spectra task: a batch of spectra becomes a masked reconstruction loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from treadle.spectra.losses import masked_mse, masked_sse
from treadle.task import StepOutput
from treadle.weights import as_count

LOSSES = {"mse": masked_mse, "sse": masked_sse}


class Augmenter(Protocol):
    """Changes spectra (B, L) in training."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the changed spectra."""
        ...


def spectra_of(batch: Any) -> Tensor:
    """Returns the spectra (B, L) of a batch: the batch itself, or the first item of a tuple or list.

    Raises:
        TypeError: the batch is something else.

    Example:
        >>> spectra_of((torch.zeros(2, 4), "meta")).shape
        torch.Size([2, 4])
    """
    x = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(x, Tensor):
        raise TypeError(
            f"batch: a {type(batch).__name__} of {type(x).__name__} is no batch of spectra; the loader must give a "
            "tensor (B, L), or a tuple or list whose first item is one"
        )
    return x


class SpectraTask:
    """Masked reconstruction: the loss is taken where the model did not look.

    Args:
        device: where batches are moved.
        loss_type: ``"mse"`` or ``"sse"``.
        reduction: ``"mean"`` (per masked element), ``"batch_mean"`` (per spectrum) or ``"sum"``.
        augmenter: changes the model's input in training; the target stays the original.
        fixed_visible: bool (L,) or (B, L), True where the encoder sees; None lets the model draw.

    Example:
        >>> task = SpectraTask(torch.device("cpu"))
    """

    def __init__(
        self,
        device: torch.device,
        *,
        loss_type: str = "mse",
        reduction: str = "mean",
        augmenter: Augmenter | None = None,
        fixed_visible: Tensor | None = None,
    ):
        self.device = device
        self.loss_fn = LOSSES[loss_type]
        self.reduction = reduction
        self.augmenter = augmenter
        self.fixed_visible = fixed_visible

    def step(
        self,
        model: nn.Module,
        batch: Any,
        totals: Mapping[str, float] | None = None,
        generator: torch.Generator | None = None,
    ) -> StepOutput:
        """Returns the masked loss of a batch, weighted by what it is a mean over."""
        x = spectra_of(batch).to(self.device, non_blocking=True)
        seen = self.augmenter(x) if self.augmenter is not None and model.training else x
        if self.fixed_visible is None:
            x_recon, _, visible_mask = model(seen)
        else:
            x_recon, _, visible_mask = model(seen, self._visible_for(x))
        mask = ~visible_mask
        loss = self.loss_fn(x_recon, x, mask, reduction=self.reduction)
        num_samples = x.shape[0]
        if self.reduction == "sum":
            return StepOutput(loss, reduction="sum", num_samples=num_samples)
        weight = as_count(mask.sum()) if self.reduction == "mean" else float(num_samples)
        return StepOutput(loss, weight=weight, num_samples=num_samples)

    def _visible_for(self, x: Tensor) -> Tensor:
        assert self.fixed_visible is not None
        fixed = self.fixed_visible.to(self.device)
        return fixed.expand(x.shape[0], -1) if fixed.dim() == 1 else fixed[: x.shape[0]]
