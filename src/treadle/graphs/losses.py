"""Losses for graphs, nodes and pairs: full-precision means over the entries that count.

Shapes: G = graphs (or nodes, or pairs of nodes), T = targets of each, C = classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.errors import ConfigError, nearest
from treadle.errors.arguments import checked
from treadle.graphs.task_types import aligned, check_labels, check_task_type, counted, margin, outputs_of

# The default comes first.
_LOSSES = {
    "regression": ("mse", "mae", "huber"),
    "classification": ("bce_logits", "cross_entropy", "bce"),
    "multilabel": ("bce_logits", "bce"),
    "edge_prediction": ("bce_logits",),
}


class GraphLoss:
    """Loss over the entries that count; `get_loss_fn` validates the settings and builds it.

    Attributes:
        task_type: task type.
        loss_type: loss type.
        num_classes: number of model outputs; None if irrelevant.
        from_logits: whether predictions are logits; False: probabilities; None: neither, as in regression.
    """

    @checked
    def __init__(
        self,
        task_type: str,
        loss_type: str,
        num_classes: int | None,
        class_weights: Tensor | None,
        target_scale: Tensor | None = None,
    ) -> None:
        self.task_type = task_type
        self.loss_type = loss_type
        self.num_classes = num_classes
        self.from_logits = None if task_type == "regression" else loss_type != "bce"
        self._class_weights = class_weights
        self._target_scale = target_scale
        self._weights_on: dict[torch.device, Tensor] = {}

    def __repr__(self) -> str:
        return f"GraphLoss({self.task_type!r}, {self.loss_type!r}, num_classes={self.num_classes})"

    def __call__(self, pred: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the mean over counted entries as a 0-d float32 tensor; 0, attached to the graph, if there are none.

        Args:
            pred: (G, T), (G, C), (G, 1) or (G,), by the task.
            target: (G, T), (G, 1) or (G,); NaN is unknown and ignored.
            mask: bool, True = counted, of the target's shape or (G,).

        Raises:
            ConfigError: shapes do not match, or a label on the CPU is not a valid class.
        """
        with torch.autocast(pred.device.type, enabled=False):
            pred, target = aligned(self.task_type, self.num_classes, pred, target)
            pred = pred if pred.dtype == torch.float64 else pred.float()
            if self._target_scale is not None:
                scale = self._target_scale.to(pred)
                pred, target = pred / scale, target.to(pred.dtype) / scale
            weights = self._entry_weights(target, mask)
            known = weights > 0
            safe = torch.where(known if pred.dim() == known.dim() else known[:, None], pred, torch.zeros_like(pred))
            losses = self._each(safe, torch.where(known, target, torch.zeros_like(target)))
            total = weights.sum()
            return (losses * weights).sum() / torch.where(total > 0, total, torch.ones_like(total))

    def count(self, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the denominator of the mean, 0-d: the number of counted entries, or the sum of their class weights.

        Raises:
            ConfigError: the mask does not match, or a label on the CPU is not a valid class.
        """
        if self.task_type in ("classification", "edge_prediction") and target.dim() == 2 and target.shape[1] == 1:
            target = target[:, 0]
        plain = self.task_type == "regression" and self._class_weights is None and target.device.type == "cpu"
        fits = mask is None or (mask.dtype == torch.bool and mask.shape == target.shape[:1])
        if plain and fits and target.dtype in (torch.float32, torch.float64):
            # A step that is replayed counts its targets before; torch takes seven calls, which let other threads in.
            known = ~np.isnan(target.detach().numpy())
            return torch.tensor(float(np.count_nonzero(known if mask is None else known[mask.numpy()])))
        return self._entry_weights(target, mask).sum()

    def _entry_weights(self, target: Tensor, mask: Tensor | None) -> Tensor:
        """Return the weight of each entry in the target's shape; 0 if it does not count."""
        if mask is not None and mask.dim() > target.dim():
            mask = mask.reshape(target.shape)
        known = counted(target, mask)
        if self.task_type != "regression":
            check_labels(max(2, self.num_classes or 2) if self.task_type == "classification" else 2, target, known)
        if self._class_weights is None:
            return known.float()
        weights = self._class_weights_on(target.device)
        if self.task_type == "multilabel":
            if len(weights) != target.shape[-1]:
                raise ConfigError(
                    f"{len(weights)} weights for {target.shape[-1]} labels; give one each", argument="class_weights"
                )
            return known * weights
        return weights[torch.where(known, target, torch.zeros_like(target)).long()] * known

    def _class_weights_on(self, device: torch.device) -> Tensor:
        assert self._class_weights is not None
        if device not in self._weights_on:
            self._weights_on[device] = self._class_weights.to(device)
        return self._weights_on[device]

    def _each(self, pred: Tensor, target: Tensor) -> Tensor:
        if self.task_type == "regression":
            target = target.to(pred.dtype)
            if self.loss_type == "huber":
                return F.smooth_l1_loss(pred, target, reduction="none")
            return (pred - target).square() if self.loss_type == "mse" else (pred - target).abs()
        if self.task_type == "classification" and pred.dim() == 2 and pred.shape[1] > 2:
            return F.cross_entropy(pred, target.long(), reduction="none")
        if self.task_type != "multilabel":
            self._check_columns(pred)
            pred = margin(pred)
        loss = F.binary_cross_entropy if self.loss_type == "bce" else F.binary_cross_entropy_with_logits
        return loss(pred, target.to(pred.dtype), reduction="none")

    def _check_columns(self, pred: Tensor) -> None:
        if pred.dim() == 2 and self.loss_type == "bce":
            raise ConfigError(
                "='bce' takes one probability for each graph, and got two columns; use one", argument="loss_type"
            )
        if pred.dim() == 1 and self.loss_type == "cross_entropy":
            raise ConfigError(
                "='cross_entropy' takes two columns, and got one logit; use 'bce_logits'", argument="loss_type"
            )


@checked
def get_loss_fn(
    task_type: str,
    loss_type: str | None = None,
    num_classes: int | None = None,
    class_weights: Sequence[float] | Tensor | None = None,
    *,
    target_scale: Tensor | None = None,
) -> GraphLoss:
    """Return the loss of a task, a mean over the entries that count; see `GraphLoss` for its call.

    Args:
        task_type: ``"regression"``, ``"classification"``, ``"multilabel"`` or ``"edge_prediction"``.
        loss_type: ``"mse"``, ``"mae"`` or ``"huber"`` (smooth L1 with beta 1) for regression; ``"bce_logits"``,
            ``"bce"`` (of probabilities) or ``"cross_entropy"`` for classification with one logit or two columns, with
            two columns read as the logit z1 - z0; ``"cross_entropy"`` for more classes; ``"bce_logits"`` or ``"bce"``
            for multilabel; ``"bce_logits"`` for edge_prediction. None uses the first applicable one.
        num_classes: number of model outputs; 1 is one logit. None: 2 for classification, else as in the target.
        class_weights: one weight >= 0 per class (two for one logit), or per label for multilabel.
        target_scale: (T,) unit of each regression target in which its error is taken, so that targets of different
            units count alike; ``graph_statistics(graphs, targets=True).target_scale``. A buffer of the model may be
            passed, whose values a checkpoint provides later.

    Raises:
        ConfigError: a value is unknown or inconsistent with the others.

    Example:
        >>> loss_fn = get_loss_fn("regression", "huber")
        >>> loss_fn(torch.tensor([[3.0], [0.5]]), torch.zeros(2))
        tensor(1.3125)
        >>> float(loss_fn.count(torch.tensor([0.0, torch.nan])))
        1.0
    """
    check_task_type(task_type)
    num_outputs = outputs_of(task_type, num_classes)
    many = task_type == "classification" and num_outputs is not None and num_outputs > 2
    allowed = ("cross_entropy",) if many else _LOSSES[task_type]
    if task_type == "classification" and num_outputs == 1:
        allowed = ("bce_logits", "bce")
    loss_type = allowed[0] if loss_type is None else loss_type
    if loss_type not in allowed:
        outputs = "" if num_outputs is None else f" with num_classes={num_outputs}"
        raise ConfigError(
            f"not a loss of {task_type}{outputs}; {nearest(str(loss_type), allowed)}",
            argument="loss_type",
            value=loss_type,
        )
    if target_scale is not None and (task_type != "regression" or target_scale.dim() != 1):
        raise ConfigError(
            f"target_scale of shape {tuple(target_scale.shape)} for {task_type}: it is one number for each target of a "
            "regression; pass None"
        )
    return GraphLoss(task_type, loss_type, num_outputs, _checked(class_weights, task_type, num_outputs), target_scale)


def _checked(weights: Sequence[float] | Tensor | None, task_type: str, num_outputs: int | None) -> Tensor | None:
    if weights is None:
        return None
    values = torch.as_tensor(weights, dtype=torch.float32).detach().cpu()
    if task_type == "regression":
        raise ConfigError("a regression has no classes; pass None", argument="class_weights")
    wanted = num_outputs if task_type == "multilabel" else max(2, num_outputs or 2)
    if values.dim() != 1 or (wanted is not None and len(values) != wanted):
        raise ConfigError(
            f"class_weights of shape {tuple(values.shape)}: there are {wanted} classes; give one weight each"
        )
    if not bool(((values >= 0) & values.isfinite()).all()):
        raise ConfigError(f"={values.tolist()}: they must be finite and >= 0", argument="class_weights")
    return values
