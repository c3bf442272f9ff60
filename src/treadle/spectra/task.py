"""Spectra training task: masked reconstruction loss of a batch of spectra."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from treadle.data import TensorLoader
from treadle.device import moved
from treadle.distributed import unwrap
from treadle.errors import ConfigError, nearest, number_of
from treadle.errors.arguments import checked
from treadle.optim.loss_weights import as_count
from treadle.spectra.losses import masked_mse, masked_sse, masked_uncertain
from treadle.spectra.model import ChemoMAE
from treadle.spectra.patches import PatchMAE
from treadle.task import Rng, StepOutput, Totals

_log = logging.getLogger("treadle.spectra")

LOSSES = {"mse": masked_mse, "sse": masked_sse}


class Augmenter(Protocol):
    """Interface of augmenters of spectra (B, L) in training."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the augmented spectra."""
        ...


def spectra_of(batch: Any) -> Tensor:
    """Return the spectra (B, L) of a batch: the batch itself, or the first item of a tuple or list.

    Raises:
        TypeError: the batch is of another type.

    Example:
        >>> spectra_of((torch.zeros(2, 4), "meta")).shape
        torch.Size([2, 4])
    """
    x = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(x, Tensor):
        raise TypeError(
            f"batch: a {type(batch).__name__} of {type(x).__name__} is not a batch of spectra; the loader must give a "
            "tensor (B, L), or a tuple or list whose first item is one"
        )
    return x


def look_at_spectra(x: Tensor) -> None:
    """Warn about a batch on the host that is a wavelength axis, or whose values are far from unit scale.

    Args:
        x: (B, L) the first batch.

    Raises:
        ConfigError: it is complex.
    """
    if x.is_complex():
        raise ConfigError(f"spectra of {x.dtype}; pass real values, such as x.abs()", argument="batch")
    if x.device.type != "cpu" or x.dim() != 2 or not x.numel():
        return
    values = x.detach().double()
    if len(x) > 1 and x.shape[1] > 1 and bool((values == values[:1]).all()) and _is_monotonic(values[0]):
        _log.warning(
            "the rows of the first batch are equal and monotonic, as wavelengths are; the first item of a batch must "
            "be the spectra"
        )
    size = float(values.square().mean().sqrt())
    if math.isfinite(size) and not 0.01 <= size <= 100.0:
        _log.warning(
            "the first batch has a root mean square of %.3g; models, losses and learning rates are for spectra of "
            "about unit scale: use SNVScaler().transform(x), or divide by a typical value",
            size,
        )


def look_at_rows(loader: Any, *, survives: bool) -> None:
    """Find values that are not finite in the spectra of a loader over tensors in memory, before training.

    Args:
        loader: the training loader; one that reads its spectra elsewhere is not examined.
        survives: whether the run skips steps that are not finite; if so, the spectra are named in a warning.

    Raises:
        ConfigError: there are such values, and they would end the run.
    """
    x = _rows_of(loader)
    if x is None or not x.is_floating_point() or x.dim() != 2:
        return
    wrong, first = 0, None
    for start in range(0, len(x), _ROWS):
        bad = ~x[start : start + _ROWS].isfinite()
        rows = bad.any(1).nonzero()
        if len(rows) and first is None:
            row = int(rows[0])
            first = start + row, int(bad[row].nonzero()[0])
        wrong += len(rows)
    if first is None:
        return
    found = (
        f"train_loader: {wrong:,} of {number_of(len(x), 'row')} have values that are not finite, the first of them in "
        f"row {first[0]}, column {first[1]} ({x[first].item()})"
    )
    if not survives:
        raise ConfigError(
            f"{found}; correct or leave out these spectra, or set max_non_finite_grad_retries to skip them"
        ).about("train_loader")
    _log.warning("%s; steps with them are skipped", found)


_ROWS = 65536  # examined at a time


def _rows_of(loader: Any) -> Tensor | None:
    """Return the spectra of a loader whose data set holds them in one tensor, or None."""
    data: Any = loader if isinstance(loader, TensorLoader) else getattr(loader, "dataset", None)
    indices = None
    if isinstance(data, Subset):
        data, indices = data.dataset, data.indices
    x = data.tensors[0] if isinstance(data, (TensorDataset, TensorLoader)) else data
    if not isinstance(x, Tensor):
        return None
    return x if indices is None else x[torch.as_tensor(indices)]


def _is_monotonic(row: Tensor) -> bool:
    differences = row.diff()
    return bool((differences > 0).all() or (differences < 0).all())


@dataclass(frozen=True)
class PreparedSpectra:
    """Batch with its random augmentation and mask, drawn on the CPU.

    Attributes:
        x: (B, L) the spectra.
        seen: (B, L) augmented input of the model; None: ``x``.
        visible_mask: (B, L) bool, True = visible; None: the model draws it.
        visible_count: visible channels per row; None: it differs between rows.
        uncertain: whether the loss weights errors by the model's uncertainty.
    """

    x: Tensor
    seen: Tensor | None = None
    visible_mask: Tensor | None = None
    visible_count: int | None = None
    uncertain: bool = False


class SpectraTask:
    """Masked reconstruction task, with the loss over hidden channels or all channels.

    Args:
        device: device that batches are moved to.
        loss_type: ``"mse"`` or ``"sse"``.
        reduction: ``"mean"`` (per masked element), ``"batch_mean"`` (per spectrum) or ``"sum"``.
        loss_region: ``"masked"`` for hidden channels, or ``"all"``.
        augmenter: augments the model's input in training; the target stays the original.
        fixed_visible: bool (L,) or (B, L), True = visible; None lets the model draw masks.

    Example:
        >>> task = SpectraTask(torch.device("cpu"))
    """

    @checked
    def __init__(
        self,
        device: torch.device,
        *,
        loss_type: str = "mse",
        reduction: str = "mean",
        loss_region: str = "masked",
        augmenter: Augmenter | None = None,
        fixed_visible: Tensor | None = None,
    ):
        if loss_type not in LOSSES:
            raise ConfigError(nearest(loss_type, LOSSES), argument="loss_type", value=loss_type)
        if loss_region not in ("masked", "all"):
            raise ConfigError("must be 'masked' or 'all'", argument="loss_region", value=loss_region)
        self.device = torch.device(device)
        self.loss_fn = LOSSES[loss_type]
        self.reduction = reduction
        self.loss_region = loss_region
        self.augmenter = augmenter
        self.fixed_visible = fixed_visible
        self._looked = False

    def step(self, model: nn.Module, batch: Any, totals: Totals = None, generator: Rng = None) -> StepOutput:
        """Return the masked loss of a batch, with the number of elements that it averages over as its weight."""
        given = batch if isinstance(batch, PreparedSpectra) else self._prepared(model, batch)
        x = moved(given.x, self.device)
        seen = x if given.seen is None else moved(given.seen, self.device)
        if given.uncertain:
            return self._uncertain_step(model, given, x, seen)
        if self.fixed_visible is not None:
            result = model(seen, self._visible_for(x))
        elif given.visible_mask is None:
            result = model(seen)
        else:
            visible_mask = moved(given.visible_mask, self.device)
            counted = {} if given.visible_count is None else {"visible_count": given.visible_count}
            result = model(seen, visible_mask, **counted)
        if not isinstance(result, (tuple, list)) or len(result) != 3:
            raise ConfigError(
                f"returned a {type(result).__name__}, must return (x_recon, z, visible_mask)", argument="model"
            )
        x_recon, _, visible_mask = result
        mask = self.counted(visible_mask)
        loss = self.loss_fn(x_recon, x, mask, reduction=self.reduction)
        if self.reduction == "sum":
            return StepOutput(loss, reduction="sum", num_samples=len(x))
        weight = self._weight_of(given)
        return StepOutput(loss, weight=as_count(mask.sum()) if weight is None else weight, num_samples=len(x))

    def _uncertain_step(self, model: nn.Module, given: PreparedSpectra, x: Tensor, seen: Tensor) -> StepOutput:
        """Return the training loss of a model that estimates uncertainty."""
        fixed = None if given.visible_mask is None else moved(given.visible_mask, self.device)
        visible_mask = fixed if self.fixed_visible is None else self._visible_for(x)
        x_recon, _, visible_mask, unsure = model(seen, visible_mask, with_uncertainty=True)
        mask = self.counted(visible_mask)
        loss = masked_uncertain(
            x_recon, x, mask, log_variance=unsure.log_variance, prior_variance=unsure.prior_variance,
            reduction=self.reduction,
        )  # fmt: skip
        if self.reduction == "sum":
            return StepOutput(loss, reduction="sum", num_samples=len(x))
        weight = self._weight_of(given)
        return StepOutput(loss, weight=as_count(mask.sum()) if weight is None else weight, num_samples=len(x))

    def counted(self, visible_mask: Tensor) -> Tensor:
        """Return the mask of elements that count in the loss, (B, L) bool."""
        return ~visible_mask if self.loss_region == "masked" else torch.ones_like(visible_mask)

    def prepare_batch(self, model: nn.Module, batch: Any) -> tuple[PreparedSpectra, float | None]:
        """Augment the spectra and draw the mask, both with CPU random numbers."""
        given = self._prepared(model, batch)
        return given, self._weight_of(given)

    def _prepared(self, model: nn.Module, batch: Any) -> PreparedSpectra:
        x = spectra_of(batch)
        if not self._looked:
            self._looked = True
            look_at_spectra(x)
        seen = None
        if self.augmenter is not None and model.training:
            x = moved(x, self.device)
            seen = self.augmenter(x)
        inner: Any = unwrap(model)
        kind = type(inner)
        uncertain = model.training and getattr(kind, "gives_uncertainty", False)
        if self.fixed_visible is None and getattr(kind, "takes_drawn_mask", False):
            return PreparedSpectra(x, seen, inner.make_visible(len(x), device="cpu"), uncertain=uncertain)
        if (
            self.fixed_visible is not None
            or not isinstance(inner, (ChemoMAE, PatchMAE))
            or not _takes_counted_mask(kind)
        ):
            return PreparedSpectra(x, seen, uncertain=uncertain)  # other models draw their own masks
        return PreparedSpectra(x, seen, inner.make_visible(len(x), device="cpu"), inner.visible_count())

    def _weight_of(self, given: PreparedSpectra) -> float | None:
        """Return the number of elements of the loss, or None if that would need a device synchronisation."""
        if self.reduction == "batch_mean":
            return float(len(given.x))
        if self.reduction == "sum" or given.visible_mask is None:
            return None
        if self.loss_region == "all":
            return float(given.x.numel())
        if given.visible_count is None:
            visible = given.visible_mask  # on the host, unless the batch was moved earlier
            return float(visible.numel() - int(visible.sum())) if visible.device.type == "cpu" else None
        return float(len(given.x) * (given.x.shape[1] - given.visible_count))

    def _visible_for(self, x: Tensor) -> Tensor:
        assert self.fixed_visible is not None
        fixed = self.fixed_visible.to(self.device)
        return fixed.expand(x.shape[0], -1) if fixed.dim() == 1 or len(fixed) == 1 else fixed[: x.shape[0]]


def _takes_counted_mask(kind: type[nn.Module]) -> bool:
    """Return ``takes_counted_mask`` of the class that defines ``forward``; False if that class does not set it."""
    owner = next(each for each in kind.__mro__ if "forward" in vars(each))
    return bool(vars(owner).get("takes_counted_mask", False))
