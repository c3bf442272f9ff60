"""Squared-error losses over the hidden channels of a spectrum.

Shapes: B = rows, L = channels. ``mask`` is True where a channel is hidden and its error counts.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from treadle.errors import ConfigError

Reduction = Literal["mean", "batch_mean", "sum"]


def masked_mse(x_recon: Tensor, x: Tensor, mask: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return the squared error at the True positions of ``mask``, by default per masked element.

    With D the squared errors at the True positions: ``"mean"`` = sum(D) / #True, ``"batch_mean"`` = sum(D) / B,
    ``"sum"`` = sum(D). Values outside the mask are not selected, so NaN or infinity there affects neither the loss nor
    its gradient. An empty mask gives 0, still attached to the graph.

    Args:
        x_recon: (B, L) floating, the reconstruction.
        x: (B, L), the target.
        mask: (B, L) bool, True = hidden = counted.
        reduction: ``"mean"``, ``"batch_mean"`` or ``"sum"``.

    Returns:
        A 0-d float32 tensor; the arithmetic is float32 even under autocast.

    Raises:
        ValueError: When the shapes differ, ``mask`` is not bool or ``reduction`` is unknown.

    Example:
        >>> import torch
        >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
        >>> x_recon = torch.tensor([[0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
        >>> mask = torch.tensor([[True, True, False, False], [True, False, False, False]])
        >>> masked_mse(x_recon, x, mask).item()
        3.0
    """
    return _masked_squared_error(x_recon, x, mask, reduction)


def masked_sse(x_recon: Tensor, x: Tensor, mask: Tensor, *, reduction: str = "batch_mean") -> Tensor:
    """Return the squared error at the True positions of ``mask``, by default summed per row of the batch.

    Same as `masked_mse` with a different default reduction; see there for arguments, result and errors.

    Example:
        >>> import torch
        >>> masked_sse(torch.zeros(1, 3), torch.ones(1, 3), torch.tensor([[True, True, False]])).item()
        2.0
    """
    return _masked_squared_error(x_recon, x, mask, reduction)


def masked_uncertain(
    x_recon: Tensor,
    x: Tensor,
    mask: Tensor,
    *,
    log_variance: Tensor,
    prior_variance: Tensor,
    reduction: str = "mean",
) -> Tensor:
    """Return squared error over prior variance plus a tenth of a Gaussian likelihood that trains the variance only.

    If the learned variance also weighted the error, the model would give up on hard channels; the fixed prior variance
    only keeps noisy channels from dominating.

    Args:
        x_recon: (B, L) floating, the reconstruction.
        x: (B, L), the target.
        mask: (B, L) bool, True = hidden = counted.
        log_variance: (B, L) logarithm of the expected squared error.
        prior_variance: (B, L) positive, detached.
        reduction: as in `masked_mse`.

    Returns:
        A 0-d float32 tensor.

    Raises:
        ValueError: As in `masked_mse`.

    Example:
        >>> import torch
        >>> x, one = torch.tensor([[1.0, 9.0]]), torch.ones(1, 2)
        >>> masked_uncertain(0 * x, x, x < 5, log_variance=0 * x, prior_variance=2 * one).item()
        0.550000011920929
    """
    _masked_squared_error(x_recon, x, mask, reduction)  # checks the arguments
    error = torch.where(mask, x_recon.float() - x.float(), 0.0).square()
    likelihood = 0.5 * (log_variance + error.detach() / log_variance.exp())
    total = torch.where(mask, error / prior_variance + 0.1 * likelihood, 0.0).sum()
    if reduction == "sum":
        return total
    if reduction == "batch_mean":
        return total / max(x.shape[0], 1)
    return total / mask.sum().clamp(min=1)


def _masked_squared_error(x_recon: Tensor, x: Tensor, mask: Tensor, reduction: str) -> Tensor:
    if reduction not in get_args(Reduction):
        raise ConfigError(f" must be one of {', '.join(get_args(Reduction))}", argument="reduction", value=reduction)
    if x_recon.shape != x.shape or mask.shape != x.shape or x.dim() == 0:
        raise ValueError(
            f"x_recon, x and mask must have one shape (B, L), got {tuple(x_recon.shape)}, "
            f"{tuple(x.shape)} and {tuple(mask.shape)}; broadcast them first if that is meant"
        )
    if mask.dtype != torch.bool:
        raise ValueError(
            f"mask has dtype {mask.dtype} but must be bool, True = hidden = counted; pass mask.bool(), "
            "or ~visible_mask for the mask that the model returns"
        )
    # where() before the square: zero times NaN would be NaN, and so would its gradient. Indexing with the mask would
    # work as well, but counting its elements synchronises with the device.
    error_BL = torch.where(mask, x_recon.float() - x.float(), 0.0)
    total = error_BL.square().sum()
    if reduction == "sum":
        return total
    if reduction == "batch_mean":
        return total / max(x.shape[0], 1)
    return total / mask.sum().clamp(min=1)
