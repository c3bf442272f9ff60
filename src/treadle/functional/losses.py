"""The loss of a batch in full precision, and how many things it is a mean over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from treadle.distributed import unwrap
from treadle.errors import ConfigError
from treadle.functional.batches import num_samples
from treadle.nested import map_nested_tensor

_PER_ELEMENT = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)
_PER_LABEL = (nn.CrossEntropyLoss, nn.NLLLoss)
_IGNORED = -100  # what models that compute their own loss leave out
_HALF = (torch.bfloat16, torch.float16)


def model_loss(outputs: Any) -> Tensor | None:
    """Returns the loss that a model computed itself: ``outputs.loss`` or ``outputs["loss"]``; None without one.

    Example:
        >>> model_loss({"loss": torch.tensor(1.0)}), model_loss(torch.zeros(2))
        (tensor(1.), None)
    """
    if isinstance(outputs, Tensor):
        return None
    return outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)


def missing_loss(loss_fn: Any, outputs: Any) -> ConfigError:
    """Returns the error of a batch from which no loss can be computed."""
    given = f"the model returned a {type(outputs).__name__} without a loss"
    if loss_fn is None:
        return ConfigError(f"loss_fn=None: {given}; pass a loss function, or labels for the model's own")
    return ConfigError(f"targets: {given} and the batch has none; yield (inputs, targets), or override _compute_loss")


def in_full_precision(loss_fn: Callable[..., Any], outputs: Any, targets: Any, device: torch.device) -> Any:
    """Returns ``loss_fn(outputs, targets)``, computed in float32 also under autocast.

    Args:
        loss_fn: the loss.
        outputs: half-precision tensors in it are widened; others stay as they are.
        targets: given as they are.
        device: whose autocast is switched off.
    """
    widened = map_nested_tensor(widen, outputs)
    if not torch.is_autocast_enabled(device.type):
        return loss_fn(widened, targets)
    with torch.autocast(device.type, enabled=False):
        return loss_fn(widened, targets)


def widen(tensor: Tensor) -> Tensor:
    """Returns a half-precision tensor as float32, any other as it is."""
    return tensor.float() if tensor.dtype in _HALF else tensor


def loss_weight(
    model: nn.Module, loss_fn: Callable[..., Any] | None, inputs: Any, outputs: Any, targets: Any
) -> float | Tensor:
    """Returns how many things the loss of a batch is a mean over.

    - The model's own loss with integer ``labels`` (B, T) in the inputs: the labels that are not -100; of a causal
      language model those from position 1 on, which are the ones it predicts.
    - CrossEntropyLoss and NLLLoss: the targets that are not ``ignore_index``; with class weights, the sum of the
      targets' class weights.
    - MSELoss, L1Loss, SmoothL1Loss, HuberLoss, BCELoss, BCEWithLogitsLoss: the target elements.
    - Everything else: the samples.

    Args:
        model: names the kind of language model.
        loss_fn: the loss, or None.
        inputs: what the model got.
        outputs: what it returned; None leaves out the first rule.
        targets: what the loss got, or None.

    Returns:
        A number; a 0-d tensor where the count lies on a device that the host would have to wait for.
    """
    if model_loss(outputs) is not None:
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        if isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point():
            predicted = labels[:, 1:] if _is_causal(model) else labels
            return as_count((predicted != _IGNORED).sum())
    elif isinstance(targets, Tensor) and getattr(loss_fn, "reduction", None) == "mean":
        if isinstance(loss_fn, _PER_LABEL):
            return _labelled(loss_fn, targets)
        if isinstance(loss_fn, _PER_ELEMENT):
            return float(targets.numel())
    samples = num_samples(inputs) if targets is None else num_samples(targets)
    return 1.0 if samples is None else float(samples)


def _is_causal(model: nn.Module) -> bool:
    inner = unwrap(model)
    base = getattr(inner, "get_base_model", None)  # of an adapter around a language model
    names = [type(inner).__name__, type(base()).__name__ if callable(base) else ""]
    return any(word in name for name in names for word in ("CausalLM", "LMHead"))


def _labelled(loss_fn: nn.CrossEntropyLoss | nn.NLLLoss, targets: Tensor) -> float | Tensor:
    if targets.is_floating_point():  # probabilities (C), (B, C) or (B, C, ...): a mean over all but the classes
        return targets.numel() / targets.shape[min(1, targets.dim() - 1)]
    counted = targets != loss_fn.ignore_index
    if loss_fn.weight is None:
        return as_count(counted.sum())
    classes = torch.where(counted, targets, torch.zeros_like(targets))
    return as_count((loss_fn.weight[classes] * counted).sum())


def as_count(count: Tensor) -> float | Tensor:
    """Returns a count on the CPU as a number, since reading it waits for nothing; on a device it stays a tensor."""
    return float(count.numpy()) if count.device.type == "cpu" else count


def without_empty(loss: Tensor, weight: float | Tensor) -> Tensor | None:
    """Returns the loss of a batch, or None if nothing in it counts.

    Where the weight lies on a device, a loss over nothing (0/0) becomes an exact 0 that keeps its graph, so that it
    neither reaches the gradient nor has to be looked at.

    Example:
        >>> without_empty(torch.tensor(float("nan")), 0.0) is None
        True
        >>> without_empty(torch.tensor(float("nan")), torch.tensor(0))
        tensor(0.)
    """
    if isinstance(weight, Tensor):
        return torch.where(weight.to(loss.device) > 0, loss, torch.zeros_like(loss))
    return None if weight == 0 else loss
