"""Evaluation by distance and size: metrics per bucket, the area under their curve, the receptive field.

Shapes: A = predictions, such as of pairs of nodes or graphs. A bucket is ``(lowest, highest)``; ``(-1, -1)`` holds
unconnected pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from treadle.errors import ConfigError
from treadle.errors.arguments import check_least
from treadle.graphs.metrics import get_metrics

Bucket = tuple[int, int]
BucketMetrics = dict[Bucket, dict[str, float]]
TaskName = Literal["regression", "classification", "binary"]
_MAIN = {"regression": "mae", "classification": "accuracy", "binary": "roc_auc"}
UNREACHABLE: Bucket = (-1, -1)


def create_distance_buckets(max_distance: int = 20, bucket_size: int = 1) -> list[Bucket]:
    """Return buckets from 0 to a maximum distance, and the bucket of unconnected pairs.

    Args:
        max_distance: maximum distance.
        bucket_size: distances per bucket; the last may have fewer.

    Raises:
        ConfigError: a number is out of range.

    Example:
        >>> create_distance_buckets(4, 2)
        [(0, 1), (2, 3), (4, 4), (-1, -1)]
    """
    check_least(0, max_distance=max_distance)
    check_least(1, bucket_size=bucket_size)
    starts = range(0, max_distance + 1, bucket_size)
    return [*((low, min(low + bucket_size - 1, max_distance)) for low in starts), UNREACHABLE]


def create_size_buckets(sizes: Sequence[int] | Tensor, num_buckets: int = 5) -> list[Bucket]:
    """Return buckets of graph sizes with about equally many graphs each.

    Args:
        sizes: (G,) nodes of each graph.
        num_buckets: maximum number of buckets; equal sizes share one.

    Example:
        >>> create_size_buckets([3, 4, 5, 6, 20, 30], 3)
        [(3, 4), (5, 19), (20, 30)]
    """
    values = torch.as_tensor(sizes).sort().values.tolist()
    if not values:
        raise ConfigError("there are none to divide into buckets", argument="sizes")
    lows = sorted({values[number * len(values) // num_buckets] for number in range(num_buckets)})
    return [*((low, following - 1) for low, following in pairwise(lows)), (lows[-1], values[-1])]


def stratify_by_distance(
    predictions: Tensor, targets: Tensor, distances: Tensor, buckets: Sequence[Bucket], mask: Tensor | None = None
) -> dict[Bucket, dict[str, Any]]:
    """Group predictions by distance bucket.

    Args:
        predictions: (A, ...).
        targets: (A, ...).
        distances: (A,) integer, hops of pairs with -1 for unconnected ones, or sizes of graphs.
        buckets: values outside all of them are ignored.
        mask: (A,) bool, True = counted.

    Returns:
        For each bucket ``predictions``, ``targets`` and ``count``.

    Example:
        >>> found = stratify_by_distance(torch.ones(3), torch.zeros(3), torch.tensor([0, 2, 2]), [(0, 1), (2, 3)])
        >>> {bucket: part["count"] for bucket, part in found.items()}
        {(0, 1): 1, (2, 3): 2}
    """
    found = {}
    for low, high in buckets:
        inside = (distances >= low) & (distances <= high)
        inside = inside if mask is None else inside & mask
        part = {"predictions": predictions[inside].cpu(), "targets": targets[inside].cpu()}
        found[low, high] = {**part, "count": int(inside.sum())}
    return found


def compute_metrics_per_bucket(
    stratified: Mapping[Bucket, Mapping[str, Any]], task_type: TaskName = "regression", *, from_logits: bool = True
) -> BucketMetrics:
    """Return the metrics of `get_metrics` for each bucket, with ``count`` and ``metric``, the main metric.

    The main metric is ``mae`` for regression, ``accuracy`` for classification and ``roc_auc`` for binary
    classification.

    Args:
        stratified: from :func:`stratify_by_distance`.
        task_type: task type of the predictions.
        from_logits: whether predictions are logits; False: probabilities. Never inferred from their range.

    Example:
        >>> part = {"predictions": torch.tensor([1.0, 2.0]), "targets": torch.zeros(2), "count": 2}
        >>> compute_metrics_per_bucket({(0, 1): part})[0, 1]["metric"]
        1.5
    """
    if task_type not in _MAIN:
        raise ConfigError(f"must be one of {', '.join(_MAIN)}", argument="task_type", value=task_type)
    found: BucketMetrics = {}
    for bucket, part in stratified.items():
        if part["count"] == 0:
            found[bucket] = {"count": 0, "metric": math.nan}
            continue
        pred, target = part["predictions"], part["targets"]
        if task_type == "regression":
            metrics = get_metrics("regression")
        else:
            classes = pred.shape[1] if pred.dim() > 1 else 1
            metrics = get_metrics("classification", 1 if task_type == "binary" else classes, from_logits=from_logits)
        metrics.update(pred, target)
        values = metrics.compute()
        found[bucket] = {**values, "count": part["count"], "metric": values[_MAIN[task_type]]}
    return found


def _curve(metrics: BucketMetrics, name: str) -> list[tuple[Bucket, float]]:
    """Return the defined values in order of distance."""
    ordered = [(bucket, metrics[bucket].get(name, math.nan)) for bucket in sorted(metrics) if bucket[0] >= 0]
    return [(bucket, value) for bucket, value in ordered if not math.isnan(value)]


def compute_relative_performance_drop(
    metrics_per_bucket: BucketMetrics,
    metric_name: str = "metric",
    baseline_bucket: Bucket = (0, 0),
    higher_is_better: bool = True,
) -> dict[Bucket, float]:
    """Return the performance drop of each bucket relative to the baseline: 0 is as good, 1 a total loss.

    Args:
        metrics_per_bucket: from :func:`compute_metrics_per_bucket`.
        metric_name: name of the metric.
        baseline_bucket: the reference bucket; if absent, the nearest one with a value.
        higher_is_better: direction of the metric.

    Example:
        >>> compute_relative_performance_drop({(0, 0): {"metric": 0.8}, (1, 1): {"metric": 0.4}})
        {(0, 0): 0.0, (1, 1): 0.5}
    """
    curve = dict(_curve(metrics_per_bucket, metric_name))
    base = curve.get(baseline_bucket, next(iter(curve.values()), math.nan))
    sign, scale = (1 if higher_is_better else -1), max(abs(base), 1e-8)
    return {
        bucket: sign * (base - metrics.get(metric_name, math.nan)) / scale
        for bucket, metrics in metrics_per_bucket.items()
    }


def compute_area_under_distance_curve(
    metrics_per_bucket: BucketMetrics, metric_name: str = "metric", max_distance: int = 20, normalize: bool = True
) -> float:
    """Return the area under the metric-distance curve (AUDC), by the trapezoidal rule over bucket midpoints.

    Args:
        metrics_per_bucket: from :func:`compute_metrics_per_bucket`.
        metric_name: name of the metric.
        max_distance: divisor of the area if normalised.
        normalize: whether to normalise the area.

    Returns:
        NaN if there are no values. For errors, a smaller area is better.

    Example:
        >>> compute_area_under_distance_curve({(d, d): {"metric": 0.5} for d in range(5)}, max_distance=4)
        0.5
    """
    curve = [((low + high) / 2, value) for (low, high), value in _curve(metrics_per_bucket, metric_name)]
    if not curve:
        return math.nan
    area = sum((b - a) * (left + right) / 2 for (a, left), (b, right) in pairwise(curve))
    return area / max_distance if normalize and max_distance > 0 else area


def find_effective_receptive_field(
    metrics_per_bucket: BucketMetrics,
    metric_name: str = "metric",
    threshold: float = 0.5,
    relative_to_baseline: bool = True,
    *,
    higher_is_better: bool = True,
) -> int:
    """Return the largest distance at which the metric passes a threshold, or -1 if there is none.

    Args:
        metrics_per_bucket: from :func:`compute_metrics_per_bucket`.
        metric_name: name of the metric.
        threshold: threshold of the value, or of its ratio to the nearest bucket's.
        relative_to_baseline: whether to use the ratio. For errors it is the ratio of inverses: with 0.5 an error of at
            most twice the nearest bucket's passes.
        higher_is_better: direction of the metric.

    Example:
        >>> values = {(d, d): {"metric": 1.0 - 0.2 * d} for d in range(5)}
        >>> find_effective_receptive_field(values), find_effective_receptive_field(values, threshold=0.7)
        (2, 1)
    """
    curve = _curve(metrics_per_bucket, metric_name)
    if not curve:
        return -1
    base = curve[0][1] if relative_to_baseline else 1.0
    if higher_is_better:
        return max((bucket[1] for bucket, value in curve if value >= base * threshold), default=-1)
    limit = base / threshold if relative_to_baseline else threshold
    return max((bucket[1] for bucket, value in curve if value <= limit), default=-1)


class DistanceStratifier:
    """Accumulator of predictions over batches, grouped by distance.

    Args:
        max_distance: maximum distance.
        bucket_size: distances per bucket.

    Example:
        >>> stratifier = DistanceStratifier(3)
        >>> stratifier.update(torch.ones(2), torch.ones(2), torch.tensor([0, 3]))
        >>> stratifier.get_bucket_counts()
        {(0, 0): 1, (1, 1): 0, (2, 2): 0, (3, 3): 1, (-1, -1): 0}
    """

    def __init__(self, max_distance: int = 20, bucket_size: int = 1):
        self.buckets = create_distance_buckets(max_distance, bucket_size)
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def reset(self) -> None:
        """Discard all predictions."""
        self._kept = []

    def update(self, predictions: Tensor, targets: Tensor, distances: Tensor, mask: Tensor | None = None) -> None:
        """Add the predictions of a batch; see :func:`stratify_by_distance`."""
        parts = (predictions.detach().cpu(), targets.detach().cpu(), distances.cpu())
        self._kept.append(parts if mask is None else tuple(part[mask.cpu()] for part in parts))  # type: ignore[arg-type]

    def compute(self) -> dict[Bucket, dict[str, Any]]:
        """Return the predictions by bucket."""
        if not self._kept:
            nothing = torch.empty(0)
            return {bucket: {"predictions": nothing, "targets": nothing, "count": 0} for bucket in self.buckets}
        predictions, targets, distances = (torch.cat(column) for column in zip(*self._kept, strict=True))
        return stratify_by_distance(predictions, targets, distances, self.buckets)

    def get_bucket_counts(self) -> dict[Bucket, int]:
        """Return the number of predictions in each bucket."""
        return {bucket: part["count"] for bucket, part in self.compute().items()}


class LongRangeEvaluator:
    """Evaluator of model performance by distance.

    Args:
        max_distance: maximum distance.
        bucket_size: distances per bucket.
        task_type: ``"regression"``, ``"classification"`` or ``"binary"``.
        from_logits: whether class predictions are logits.

    Example:
        >>> evaluator = LongRangeEvaluator(max_distance=3)
        >>> evaluator.update(torch.tensor([1.0, 3.0]), torch.zeros(2), torch.tensor([0, 3]))
        >>> found = evaluator.compute()
        >>> found["metrics_per_bucket"][3, 3]["mae"], found["effective_receptive_field"], found["auc"]
        (3.0, 0, 2.0)
    """

    def __init__(
        self,
        max_distance: int = 20,
        bucket_size: int = 1,
        task_type: TaskName = "regression",
        *,
        from_logits: bool = True,
    ):
        self.config = {"max_distance": max_distance, "bucket_size": bucket_size, "task_type": task_type}
        self.stratifier = DistanceStratifier(max_distance, bucket_size)
        self._max_distance, self._task_type, self._from_logits = max_distance, task_type, from_logits

    def reset(self) -> None:
        """Discard all predictions."""
        self.stratifier.reset()

    def update(self, predictions: Tensor, targets: Tensor, distances: Tensor, mask: Tensor | None = None) -> None:
        """Add the predictions of a batch; see :func:`stratify_by_distance`."""
        self.stratifier.update(predictions, targets, distances, mask)

    def compute(self) -> dict[str, Any]:
        """Return ``metrics_per_bucket``, ``relative_drops``, ``auc``, ``effective_receptive_field``,
        ``aggregate_metrics``, ``bucket_counts`` and ``config``."""
        stratified = self.stratifier.compute()
        metrics = compute_metrics_per_bucket(stratified, self._task_type, from_logits=self._from_logits)
        better = self._task_type != "regression"
        parts = [part for part in stratified.values() if part["count"]]
        whole: dict[Bucket, dict[str, Any]] = {(0, self._max_distance): {"count": sum(part["count"] for part in parts)}}
        for name in ("predictions", "targets") if parts else ():
            whole[0, self._max_distance][name] = torch.cat([part[name] for part in parts])
        return {
            "metrics_per_bucket": metrics,
            "relative_drops": compute_relative_performance_drop(metrics, higher_is_better=better),
            "auc": compute_area_under_distance_curve(metrics, max_distance=self._max_distance),
            "effective_receptive_field": find_effective_receptive_field(metrics, higher_is_better=better),
            "aggregate_metrics": compute_metrics_per_bucket(whole, self._task_type, from_logits=self._from_logits),
            "bucket_counts": self.stratifier.get_bucket_counts(),
            "config": self.config,
        }

    def get_summary(self) -> dict[str, float]:
        """Return ``auc``, ``effective_receptive_field``, ``aggregate_metric``, and the main metric near and far."""
        found = self.compute()
        curve = _curve(found["metrics_per_bucket"], "metric")
        (whole,) = found["aggregate_metrics"].values()
        summary = {name: found[name] for name in ("auc", "effective_receptive_field")}
        summary["aggregate_metric"] = whole["metric"]
        if curve:
            near, far = curve[0][1], curve[-1][1]
            ratio = far / max(near, 1e-8)
            summary |= {"short_range_metric": near, "long_range_metric": far, "performance_ratio": ratio}
        return summary
