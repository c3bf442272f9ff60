"""Losses computed by a model itself, and the number of elements that a loss averages over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from treadle.data.host_copies import host_of
from treadle.distributed import unwrap
from treadle.errors import ConfigError, TreadleError
from treadle.functional.batches import num_samples
from treadle.nested import shapes_of
from treadle.optim.loss_weights import as_count

_PER_ELEMENT = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)
_PER_LABEL = (nn.CrossEntropyLoss, nn.NLLLoss)
_IGNORED = -100  # ignored label of models that compute their own loss


_RULES: tuple[tuple[tuple[type, ...], str], ...] = (
    (_PER_LABEL, "outputs (N, C, ...) and targets (N, ...) of int64 from 0 to C - 1, or probabilities (N, C, ...)"),
    (_PER_ELEMENT, "outputs and floating targets of one shape"),
)


def refuse_broadcast(loss_fn: Any, outputs: Any, targets: Any) -> None:
    """Raise ConfigError where a loss of torch would compare a column with a row, each output with every target.

    Example:
        >>> refuse_broadcast(nn.MSELoss(), torch.zeros(4, 1), torch.zeros(4, 1))
    """
    if not isinstance(loss_fn, _PER_ELEMENT) or not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return
    given, wanted = tuple(outputs.shape), tuple(targets.shape)
    rows = given[0] if given else 0
    if rows > 1 and (given, wanted) in (((rows, 1), (rows,)), ((rows,), (rows, 1))):
        raise ConfigError(
            f"outputs have shape {given} and targets {wanted}, which {type(loss_fn).__name__} would broadcast to "
            f"({rows}, {rows}); give both the same shape, for example targets[:, None] or outputs.squeeze(1)",
            argument="targets",
        )


def explain_loss_error(error: Exception, loss_fn: Any, outputs: Any, targets: Any) -> None:
    """Add to an error of a loss function, as a note, the shapes that it was given, and what one of torch takes."""
    if isinstance(error, TreadleError) or not hasattr(error, "add_note"):  # before Python 3.11
        return
    rule = next((f"; it takes {rule}" for kinds, rule in _RULES if isinstance(loss_fn, kinds)), "")
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    error.add_note(f"loss_fn={name} rejected outputs {shapes_of(outputs)} and targets {shapes_of(targets)}{rule}")


def model_loss(outputs: Any) -> Tensor | None:
    """Return the loss computed by a model: ``outputs.loss`` or ``outputs["loss"]``; None without one.

    Example:
        >>> model_loss({"loss": torch.tensor(1.0)}), model_loss(torch.zeros(2))
        (tensor(1.), None)
    """
    if isinstance(outputs, Tensor):
        return None
    return outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)


def missing_loss(loss_fn: Any, outputs: Any) -> ConfigError:
    """Return the error of a batch from which no loss can be computed."""
    given = f"the model returned a {type(outputs).__name__} without a loss"
    if loss_fn is None:
        return ConfigError(
            f"{given}; pass a loss function, or yield dicts with the targets of the model's own, such as 'labels'",
            argument="loss_fn",
            value=None,
        )
    return ConfigError(
        f"{given} but the batch has no targets; yield (inputs, targets), or override _prepare_batch(batch) to return "
        "both, such as (batch, batch.y) for graphs",
        argument="targets",
    )


def loss_weight(
    model: nn.Module, loss_fn: Callable[..., Any] | None, *, inputs: Any, outputs: Any, targets: Any
) -> float | Tensor:
    """Return the number of elements that the loss of a batch averages over.

    - The model's own loss with integer ``labels`` (B, T) in the inputs: labels other than -100; for a causal language
    model from position 1 on, which are the ones it predicts.
    - CrossEntropyLoss and NLLLoss: targets other than ``ignore_index``; with class weights, the sum of the targets'
    class weights.
    - MSELoss, L1Loss, SmoothL1Loss, HuberLoss, BCELoss, BCEWithLogitsLoss: the target elements.
    - Anything else: samples.

    Args:
        model: model, whose config tells the kind of language model.
        loss_fn: the loss, or None.
        inputs: inputs of the model.
        outputs: outputs of the model; None skips the first rule.
        targets: targets of the loss, or None.

    Returns:
        A number, or a 0-d tensor if reading the count would make the host wait for a device.
    """
    counts = counted_labels(model, loss_fn, inputs=inputs, outputs=outputs, targets=targets)
    if counts is not None:
        return as_count(counts.sum())
    if model_loss(outputs) is None and isinstance(targets, Tensor) and getattr(loss_fn, "reduction", None) == "mean":
        if isinstance(loss_fn, _PER_LABEL):
            return _labelled(loss_fn, targets)
        if isinstance(loss_fn, _PER_ELEMENT):
            return float(targets.numel())
    samples = num_samples(inputs) if targets is None else num_samples(targets)
    return 1.0 if samples is None else float(samples)


def counted_labels(
    model: nn.Module, loss_fn: Callable[..., Any] | None, *, inputs: Any, outputs: Any, targets: Any
) -> Tensor | None:
    """Return the mask of labels that the loss of a batch averages over; None if :func:`loss_weight` counts otherwise.

    The arguments are those of :func:`loss_weight`; None for ``outputs`` excludes the model's own loss.

    Returns:
        Bool tensor, samples first; True where a label counts. On the host if the labels are known there.

    Example:
        >>> loss = nn.CrossEntropyLoss()
        >>> counted_labels(nn.ReLU(), loss, inputs=None, outputs=None, targets=torch.tensor([1, -100])).tolist()
        [True, False]
    """
    if model_loss(outputs) is not None:
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.is_floating_point():
            return None
        labels = host_of(labels)
        return (labels[:, 1:] if _is_causal(model) else labels) != _IGNORED
    if not isinstance(targets, Tensor) or targets.is_floating_point() or not isinstance(loss_fn, _PER_LABEL):
        return None
    is_plain_mean = loss_fn.reduction == "mean" and loss_fn.weight is None
    return host_of(targets) != loss_fn.ignore_index if is_plain_mean else None


def num_counted(loss_fn: Callable[..., Any] | None, outputs: Any, targets: Any) -> float | Tensor | None:
    """Return the number of targets of a loss with class weights, over which metrics such as accuracy are averaged.

    None if the weight of the loss is already that number.

    Example:
        >>> num_counted(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0])), None, torch.tensor([0, 1, -100]))
        2.0
        >>> num_counted(nn.CrossEntropyLoss(), None, torch.tensor([0, 1])) is None
        True
    """
    if model_loss(outputs) is not None or not isinstance(loss_fn, _PER_LABEL) or loss_fn.weight is None:
        return None
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    return as_count((host_of(targets) != loss_fn.ignore_index).sum())


def _is_causal(model: nn.Module) -> bool:
    inner = unwrap(model)
    base = getattr(inner, "get_base_model", None)  # an adapter around a language model
    names = [type(inner).__name__, type(base()).__name__ if callable(base) else ""]
    return any(word in name for name in names for word in ("CausalLM", "LMHead"))


def _labelled(loss_fn: nn.CrossEntropyLoss | nn.NLLLoss, targets: Tensor) -> float | Tensor:
    if targets.is_floating_point():  # probabilities (C), (B, C) or (B, C, ...): a mean over all but the classes
        return targets.numel() / targets.shape[min(1, targets.dim() - 1)]
    assert loss_fn.weight is not None, "counted_labels() handles a loss without class weights"
    targets = targets.to(loss_fn.weight.device, non_blocking=True)
    counted = targets != loss_fn.ignore_index
    classes = torch.where(counted, targets, torch.zeros_like(targets))
    return as_count((loss_fn.weight[classes] * counted).sum())
