"""Metrics over all predictions of an epoch: equal to scikit-learn's, gathered over ranks, NaN if undefined.

Shapes: G = graphs (or nodes, or pairs of nodes), T = targets of each, C = classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from treadle.device.host_transfer import HostTransfer
from treadle.errors import ConfigError, MissingExtraError
from treadle.errors.arguments import check_least, check_whole, checked
from treadle.graphs.task_types import aligned, check_labels, check_task_type, counted, margin, outputs_of

_HALF = (torch.bfloat16, torch.float16)
MOST_KEPT = 65_536
"""Maximum number of stored prediction values before they are summed or, in training, discarded."""


class GraphMetrics:
    """Metrics of a task, built by `get_metrics`.

    Predictions and targets stay on their device until computed; for regression only the latest, and sums of earlier
    ones, since its metrics are sums. Whether they are logits is declared, never inferred from their range. A NaN
    prediction makes every metric NaN.

    Attributes:
        from_logits: whether predictions are logits; None if irrelevant, as in regression.
        names: the keys of `compute`.
    """

    def __init__(self, task_type: str, num_classes: int, *, from_logits: bool, k: int) -> None:
        check_task_type(task_type)
        check_whole(1, k=k)
        self.task_type = task_type
        self.num_classes = outputs_of(task_type, num_classes) if task_type == "classification" else None
        if task_type == "edge_prediction":
            self.num_classes = 1
        self.from_logits = None if task_type == "regression" else from_logits
        self.k = k
        self.names = self._names()
        if "roc_auc" in self.names:
            _curves()  # report a missing package now, not after an epoch
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []
        self._num_kept = 0
        self._sums: list[float | Tensor] = [0.0, 0.0, 0.0]  # count, squared and absolute errors

    @property
    def adds_up(self) -> bool:
        """Whether the metrics are computed from sums over the predictions."""
        return self.task_type == "regression"

    def like(self) -> GraphMetrics:
        """Return empty metrics with the same settings."""
        return GraphMetrics(self.task_type, self.num_classes or 2, from_logits=bool(self.from_logits), k=self.k)

    def fold(self) -> None:
        """Replace stored regression predictions by their sums, without device synchronisation."""
        for pred, target, known in self._kept:
            error = torch.where(known, _wide(pred) - _wide(target), 0.0)
            added = (known.sum(), error.square().sum(), error.abs().sum())
            self._sums = [total + part for total, part in zip(self._sums, added, strict=True)]
        self._kept, self._num_kept = [], 0

    def sums(self) -> list[float]:
        """Return the folded sums: count, squared errors and absolute errors."""
        return [float(total) for total in self._sums]

    def add_sums(self, sums: Sequence[float]) -> None:
        """Add sums returned by :meth:`sums`."""
        self._sums = [total + part for total, part in zip(self._sums, sums, strict=True)]

    def _names(self) -> tuple[str, ...]:
        if self.task_type == "regression":
            return ("mse", "mae", "rmse")
        if self.task_type == "multilabel":
            return ("accuracy", "roc_auc", "ap")
        if self.task_type == "edge_prediction":
            return ("roc_auc", "ap", f"precision@{self.k}")
        if self.num_classes is not None and self.num_classes > 2:
            return ("accuracy", "f1_macro", "roc_auc")
        return ("accuracy", "f1", "roc_auc", "ap")

    def reset(self) -> None:
        """Discard everything."""
        self._kept, self._num_kept, self._sums = [], 0, [0.0, 0.0, 0.0]

    def update(self, pred: Tensor, target: Tensor, mask: Tensor | None = None) -> None:
        """Add the predictions of a batch.

        Args:
            pred: as for the loss of the task.
            target: as for the loss of the task; NaN is unknown and ignored.
            mask: bool, True = counted, of the target's shape or (G,).

        Raises:
            ConfigError: shapes do not match, or a label on the CPU is not a valid class.
        """
        pred, target = aligned(self.task_type, self.num_classes, pred.detach(), target.detach())
        if mask is not None and mask.dim() > target.dim():
            mask = mask.reshape(target.shape)
        known = counted(target, mask)
        if self.task_type != "regression":
            check_labels(max(2, self.num_classes or 2), target, known)
        self._kept.append((pred.float() if pred.dtype in _HALF else pred, target, known))
        self._num_kept += pred.numel()
        if self.adds_up and self._num_kept > MOST_KEPT:
            self.fold()

    def compute(self) -> dict[str, float]:
        """Return the metrics over everything added on all ranks.

        Raises:
            ConfigError: nothing was added.
        """
        if self.adds_up and any(rank for rank in _from_all_ranks(self.sums()[0] > 0)):
            return self._from_sums()
        parts = [part for rank in _from_all_ranks(_joined(self._kept)) for part in rank]
        if not parts:
            raise ConfigError(
                "no prediction was added; call update first, with batches of a loader", argument="compute"
            )
        pred, target, known = _joined(parts)[0]
        if not bool(known.any()) or bool(pred[known].isnan().any()):
            return dict.fromkeys(self.names, math.nan)
        pred = pred.double()
        if self.task_type == "regression":
            return _regression(pred[known], target[known].double())
        if self.task_type == "multilabel":
            return _multilabel(pred, self._score(pred) > 0.5, target, known)
        pred, target = pred[known], target[known].long()
        if pred.dim() == 2 and pred.shape[1] > 2:
            return _classes(pred.softmax(1) if self.from_logits else pred, target)
        if pred.dim() == 2 and not self.from_logits:
            pred = pred[:, 1]
        score = margin(pred)
        if self.task_type == "edge_prediction":
            return {**_curve_values(score, target), f"precision@{self.k}": _precision_at(score, target, self.k)}
        return {**_labels(self._score(score) > 0.5, target), **_curve_values(score, target)}

    def _from_sums(self) -> dict[str, float]:
        kept, before = self._kept, self._sums
        self.fold()
        count, squared, absolute = (math.fsum(column) for column in zip(*_from_all_ranks(self.sums()), strict=True))
        self._kept, self._sums = kept, before
        if math.isnan(squared):
            return dict.fromkeys(self.names, math.nan)
        return {"mse": squared / count, "mae": absolute / count, "rmse": math.sqrt(squared / count)}

    def _score(self, logit: Tensor) -> Tensor:
        return logit.sigmoid() if self.from_logits else logit


@checked
def get_metrics(task_type: str, num_classes: int = 2, *, from_logits: bool = True, k: int = 100) -> GraphMetrics:
    """Build the metrics of a task, with ``reset()``, ``update(pred, target, mask=None)`` and ``compute()``.

    - regression: ``mse``, ``mae``, ``rmse`` over the known entries.
    - classification with one logit or two columns: ``accuracy``, ``f1``, ``roc_auc``, ``ap``. The score is the sigmoid
      of the logit, or of z1 - z0; the label is score > 0.5.
    - classification with C >= 3: ``accuracy``, ``f1_macro``, ``roc_auc`` (one-vs-rest, mean over the classes that
    occur). - multilabel: ``accuracy`` over the known entries; ``roc_auc`` and ``ap``, means over the columns with both
    classes among the known entries.
    - edge_prediction: ``roc_auc``, ``ap``, ``precision@k`` of the min(k, n) best scores.

    Tied scores get mean ranks, also in ``precision@k``. An undefined metric, for example with only one class, is NaN.

    Args:
        task_type: task type.
        num_classes: number of classes, for classification only; 1 is one logit.
        from_logits: whether predictions are logits or probabilities.
        k: number of scores considered by ``precision@k``.

    Raises:
        ConfigError: a value is unknown or out of range.
        ImportError: torchmetrics, which the curves need, is missing.

    Example:
        >>> metrics = get_metrics("regression")
        >>> metrics.update(torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        >>> metrics.compute()
        {'mse': 2.5, 'mae': 1.5, 'rmse': 1.5811388300841898}
    """
    check_least(1, num_classes=num_classes, k=k)
    return GraphMetrics(task_type, num_classes, from_logits=from_logits, k=k)


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.device.type == "mps" else values.double()  # which has no float64


def _joined(parts: list[tuple[Tensor, Tensor, Tensor]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    if not parts:
        return []
    if len({part[0].device for part in parts}) > 1:
        parts = [(pred.cpu(), target.cpu(), known.cpu()) for pred, target, known in parts]
    # Concatenated on their device: hundreds of small copies to the host would synchronise one by one.
    sent = [HostTransfer(torch.cat([part[place] for part in parts])) for place in range(3)]
    pred, target, known = (numbers.result() for numbers in sent)
    return [(pred, target, known)]


def _from_all_ranks(value: Any) -> list[Any]:
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _regression(pred: Tensor, target: Tensor) -> dict[str, float]:
    error = pred - target
    mse = float(error.square().mean())
    return {"mse": mse, "mae": float(error.abs().mean()), "rmse": math.sqrt(mse)}


def _labels(label: Tensor, target: Tensor) -> dict[str, float]:
    return {"accuracy": float((label == target).double().mean()), "f1": _f1(label, target == 1)}


def _f1(predicted: Tensor, actual: Tensor) -> float:
    hits, total = int((predicted & actual).sum()), int(predicted.sum()) + int(actual.sum())
    return 2 * hits / total if total else math.nan


def _classes(score: Tensor, target: Tensor) -> dict[str, float]:
    label = score.argmax(1)
    occurring = sorted({*target.tolist(), *label.tolist()})
    f1 = [_f1(label == c, target == c) for c in occurring]
    areas = [_curve_values(score[:, c], (target == c).long())["roc_auc"] for c in sorted(set(target.tolist()))]
    return {
        "accuracy": float((label == target).double().mean()),
        "f1_macro": sum(f1) / len(f1),
        "roc_auc": sum(areas) / len(areas),
    }


def _multilabel(score: Tensor, label: Tensor, target: Tensor, known: Tensor) -> dict[str, float]:
    columns = [_curve_values(score[known[:, t], t], target[known[:, t], t].long()) for t in range(score.shape[1])]
    defined = [column for column in columns if not math.isnan(column["roc_auc"])]
    right = label[known] == target[known].bool()
    means = {name: _mean([column[name] for column in defined]) for name in ("roc_auc", "ap")}
    return {"accuracy": float(right.double().mean()), **means}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _curve_values(score: Tensor, target: Tensor) -> dict[str, float]:
    """Return the areas under both curves, which depend only on the order of scores; NaN unless both classes occur."""
    positives = int(target.sum())
    if positives in (0, len(target)):
        return {"roc_auc": math.nan, "ap": math.nan}
    auroc, average_precision = _curves()
    # Ranks, since torchmetrics would take the sigmoid of logits, which rounds to 1 from 37 on and creates ties.
    rank = torch.unique(score, return_inverse=True)[1]
    share = rank.double() / len(score)
    return {"roc_auc": float(auroc(share, target)), "ap": float(average_precision(share, target))}


def _curves() -> tuple[Any, Any]:
    try:
        from torchmetrics.functional.classification import binary_auroc, binary_average_precision
    except ImportError as error:
        raise MissingExtraError(
            "the metrics roc_auc and ap need torchmetrics: pip install 'treadle[graphs]'"
        ) from error
    return binary_auroc, binary_average_precision


def _precision_at(score: Tensor, target: Tensor, k: int) -> float:
    """Return the fraction of positives among the k best scores; for ties at the cutoff, the expected fraction."""
    k = min(k, len(score))
    border = score.sort(descending=True).values[k - 1]
    above, tied = score > border, score == border
    places = k - int(above.sum())
    return (int(target[above].sum()) + places * int(target[tied].sum()) / int(tied.sum())) / k
