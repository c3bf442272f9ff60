"""Task types: shapes of predictions, column semantics, and targets that count.

Losses and metrics interpret predictions through this module, so they agree. Shapes: G = graphs (or nodes, or pairs of
nodes), T = targets of each, C = classes.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from treadle.errors import ConfigError, nearest
from treadle.errors.arguments import check_argument, check_least

TaskType: TypeAlias = Literal["regression", "classification", "multilabel", "edge_prediction"]


def check_task_type(task_type: str) -> None:
    """Raise ConfigError for an unknown task type, with a suggestion."""
    if task_type not in get_args(TaskType):
        # The nearest word to "multiclass" would be "multilabel".
        meant = "classification" if task_type in ("multiclass", "binary") else task_type
        raise ConfigError(nearest(meant, get_args(TaskType)), argument="task_type", value=task_type)


def outputs_of(task_type: str, num_classes: int | None) -> int | None:
    """Return the number of outputs of a task: 2 for classification by default, 1 for pairs, else as given.

    Raises:
        ConfigError: the number is not an integer >= 1, or the task does not allow it.

    Example:
        >>> outputs_of("classification", None), outputs_of("edge_prediction", None), outputs_of("regression", None)
        (2, 1, None)
    """
    check_argument("num_classes", num_classes, int | None)
    check_least(1, num_classes=num_classes)
    if task_type == "edge_prediction":
        if num_classes not in (None, 1):
            raise ConfigError(
                f"={num_classes}: edge_prediction has one logit for each pair; for more, use "
                "task_type='classification'",
                argument="num_classes",
            )
        return 1
    return 2 if task_type == "classification" and num_classes is None else num_classes


def aligned(task_type: str, num_outputs: int | None, pred: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the prediction and target in one of three shapes; raise if they would need broadcasting.

    - (G, T) and (G, T): regression and multilabel; a 1-D target of a 2-D prediction gets a last axis.
    - (G,) and (G,): one logit per graph.
    - (G, C) and (G,): two columns or more; the target is a class.

    Args:
        task_type: task type.
        num_outputs: number of outputs of the task; None if irrelevant.
        pred: output of the model.
        target: (G,), (G, 1) or (G, T).

    Raises:
        ConfigError: the shapes do not match; both are named.

    Example:
        >>> [t.shape for t in aligned("classification", 2, torch.zeros(3, 1), torch.zeros(3, 1))]
        [torch.Size([3]), torch.Size([3])]
    """
    given = f"task_type={task_type!r}: the prediction has shape {tuple(pred.shape)}, the target {tuple(target.shape)}"
    if task_type in ("regression", "multilabel"):
        target = target[:, None] if target.dim() == 1 and pred.dim() == 2 else target
        if pred.shape != target.shape or pred.dim() == 0:
            raise ConfigError(f"{given}; they must have the same shape (G, T), nothing is broadcast")
        if num_outputs is not None and (pred.shape[1] if pred.dim() == 2 else 1) != num_outputs:
            raise ConfigError(f"{given}, and num_classes={num_outputs}; build the model with that many outputs")
        return pred, target
    target = target[:, 0] if target.dim() == 2 and target.shape[1] == 1 else target
    columns = 1 if pred.dim() == 1 else pred.shape[1] if pred.dim() == 2 else 0
    allowed = (1, 2) if num_outputs == 2 else (num_outputs,)
    if columns not in allowed:
        wanted = "(G,) or (G, 1)" if num_outputs == 1 else f"(G, {num_outputs})"
        raise ConfigError(f"{given}; with num_classes={num_outputs} the prediction must have shape {wanted}")
    if target.shape != pred.shape[:1]:
        raise ConfigError(f"{given}; there must be one target for each row of the prediction, nothing is broadcast")
    return (pred.reshape(-1) if columns == 1 else pred), target


def margin(pred: Tensor) -> Tensor:
    """Return the logit of class 1 (G,): the only column, or the difference of two.

    Example:
        >>> margin(torch.tensor([[1.0, 3.0]]))
        tensor([2.])
    """
    return pred if pred.dim() == 1 else pred[:, 1] - pred[:, 0]


def counted(target: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask of target entries that count, in its shape: those that are known (not NaN) and in ``mask``.

    Args:
        target: any shape (G, ...).
        mask: (G,) or the target's shape, bool, True = counted; None for all.

    Raises:
        ConfigError: the mask is not bool or has the wrong shape.

    Example:
        >>> counted(torch.tensor([[1.0, torch.nan], [1.0, 1.0]]), torch.tensor([True, False]))
        tensor([[ True, False],
                [False, False]])
    """
    known = ~target.isnan() if target.is_floating_point() else torch.ones_like(target, dtype=torch.bool)
    if mask is None:
        return known
    if mask.dtype != torch.bool or mask.shape not in (target.shape, target.shape[:1]):
        raise ConfigError(
            f"a {mask.dtype} tensor of shape {tuple(mask.shape)}; it must be bool, True = counted, of shape "
            f"{tuple(target.shape)} or {tuple(target.shape[:1])}",
            argument="mask",
        )
    return known & mask.reshape(*mask.shape, *[1] * (target.dim() - mask.dim()))


def check_labels(num_labels: int, target: Tensor, known: Tensor) -> None:
    """Raise ConfigError for labels that are not classes; those on a device are not checked, which would synchronise.

    Args:
        num_labels: C, the number of classes.
        target: labels, any shape; they must be 0, 1, … C - 1.
        known: bool, the target's shape; the labels that count.
    """
    if target.device.type != "cpu":
        return
    labels = target[known]
    wrong = (labels < 0) | (labels >= num_labels)
    if labels.is_floating_point():
        wrong |= labels != labels.floor()
    if wrong.numpy().any():
        raise ConfigError(
            f"{labels[wrong][0].tolist()!r} is not a class; the labels must be whole numbers from 0 to "
            f"{num_labels - 1}. Give num_classes (1 or 2 for two classes), or correct the labels",
            argument="target",
        )
