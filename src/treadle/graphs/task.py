"""Graph training task: loss of a batch of graphs, its weight, and the outputs for epoch metrics."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from treadle import distributed
from treadle.data.graph_sizes import count_sizes, record_sizes
from treadle.data.host_copies import host_of
from treadle.device import to_device
from treadle.errors import ConfigError
from treadle.errors.arguments import checked
from treadle.graphs.inputs import explaining_edges
from treadle.graphs.losses import GraphLoss
from treadle.graphs.masks import counted_rows
from treadle.graphs.metrics import GraphMetrics
from treadle.graphs.padded import PaddedGraphBatch
from treadle.graphs.padding import Padding, PreparedGraphs
from treadle.graphs.task_types import aligned, counted
from treadle.nested import map_nested_tensor, shapes_of
from treadle.optim.loss_weights import as_count, without_empty
from treadle.optim.precision import in_full_precision, widen
from treadle.task import Rng, StepOutput, Totals

LossFn = Callable[..., Tensor]
Outputs = tuple[Tensor, Tensor, Tensor | None]


class EpochMetrics(Protocol):
    """Interface of metrics over an epoch, such as `GraphMetrics` or a torchmetrics collection."""

    def reset(self) -> Any:
        """Discard everything."""
        ...

    def update(self, pred: Tensor, target: Tensor) -> Any:
        """Add the predictions of a batch, without padding."""
        ...

    def compute(self) -> Any:
        """Return the metrics by name."""
        ...


def target_of(batch: Any) -> Tensor:
    """Return ``batch.y``, or ``batch.target`` if there is no ``y``.

    Raises:
        ConfigError: the batch has neither.

    Example:
        >>> from types import SimpleNamespace
        >>> target_of(SimpleNamespace(target=torch.zeros(1)))
        tensor([0.])
    """
    for name in ("y", "target"):
        target = getattr(batch, name, None)
        if isinstance(target, Tensor):
            return target
    other = getattr(batch, "y", None)
    found = "without targets" if other is None else f"whose 'y' is {shapes_of(other)}"
    raise ConfigError(f"a {type(batch).__name__} {found}; it needs a tensor 'y', or 'target'", argument="batch")


class FedMetrics:
    """Adapter that passes the outputs of a task to metrics.

    Args:
        metrics: the metrics to update.
    """

    def __init__(self, metrics: EpochMetrics):
        self._metrics = metrics
        self._fed = 0

    def reset(self) -> None:
        """Discard everything."""
        self._metrics.reset()
        self._fed = 0

    def update(self, outputs: Outputs) -> None:
        """Add the outputs of one micro-batch."""
        pred, target, mask = outputs
        if isinstance(self._metrics, GraphMetrics):
            self._metrics.update(pred, target, mask)
        else:
            if mask is not None:
                pred, target = pred[mask], target[mask]
            self._metrics.update(*_known(pred, target))
        self._fed += 1

    def compute(self) -> Mapping[str, Any]:
        """Return the metrics by name; empty if no rank had an output, as for a model that returns no tensor."""
        return dict(self._metrics.compute()) if distributed.agree(self._fed) else {}


def _known(pred: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Drop the entries whose target is NaN, for metrics that would become NaN."""
    if not target.is_floating_point() or pred.shape != target.shape:
        return pred, target
    known = ~target.isnan()
    return (pred, target) if bool(known.all()) else (pred[known], target[known])


class GraphTask:
    """Supervised learning on graphs, nodes or pairs.

    If a batch has a ``target_mask`` (bool, True = counted), like padded batches, only its rows count. If it has
    ``train_mask``, ``val_mask`` and ``test_mask``, training counts the rows of the first, and an evaluation those of
    the mask it names. NaN targets are unknown and ignored.

    Args:
        device: device that batches are moved to.
        task_type: task type.
        loss_fn: a `GraphLoss`, or any function (prediction, target) -> mean loss.
        metrics: metrics for evaluation.
        padding: pads training batches; None: no padding.

    Attributes:
        step_outputs: outputs of the training steps since they were last collected; see `TrainOutputsHook`.
        reads_masks: True, since batches are counted by their masks.

    Example:
        >>> # Engine(model, optimizer, GraphTask(device, "regression", loss_fn=loss_fn, metrics=metrics))
    """

    reads_masks = True

    @checked
    def __init__(
        self,
        device: torch.device,
        task_type: str,
        *,
        loss_fn: LossFn,
        metrics: EpochMetrics,
        padding: Padding | None = None,
    ):
        self.device = device
        self.task_type = task_type
        self.loss_fn = loss_fn
        self.metrics = FedMetrics(metrics)
        self.padding = Padding() if padding is None else padding
        self.step_outputs: list[Outputs] = []
        self._graphs_left: int | None = None
        self._evaluated_mask = "val_mask"
        self._tries_loss = not isinstance(loss_fn, GraphLoss)

    def step(self, model: nn.Module, batch: Any, totals: Totals = None, generator: Rng = None) -> StepOutput:
        """Return the loss of a batch with the number of counted entries as its weight."""
        if isinstance(batch, PreparedGraphs):
            batch = batch.padded
        elif torch.is_grad_enabled():
            batch = self.padding.padded(batch)
        # Counting and label checks come before the move: on the host they do not synchronise.
        num_graphs = graphs_in(batch)
        kept = self._without_copies(batch, num_graphs)
        weight = self._weight(batch, kept)
        has_unknown = self._tries_loss and _has_unknown(batch)
        batch = _moved(batch, self.device)
        target, mask = target_of(batch), counted_rows(batch, self._split_mask)
        with explaining_edges(batch):
            pred = model(batch)
        if isinstance(pred, Tensor):
            pred, target = self._same_shape(pred, target)
            if kept is not None:
                pred, target, mask = pred[kept], target[kept], None if mask is None else mask[kept]
        if has_unknown:
            self._refuse_unknown(pred, target)
        loss = self._loss(pred, target, mask)
        outputs = None
        if isinstance(pred, Tensor):
            outputs = (widen(pred.detach()), target, mask)
            if torch.is_grad_enabled():
                self.step_outputs.append(outputs)
        if self._adds_up:
            return StepOutput(loss, reduction="sum", outputs=outputs, num_samples=num_graphs)
        return StepOutput(without_empty(loss, weight), weight=weight, outputs=outputs, num_samples=num_graphs)

    def prepare_batch(self, model: nn.Module, batch: Any) -> tuple[Any, float | None]:
        """Pad a batch and count its targets if they are on the host."""
        padded = self.padding.padded(batch)
        if not isinstance(padded, PaddedGraphBatch):
            return batch, None
        weight = None if self._adds_up else self._weight(padded, None)
        return PreparedGraphs(padded), weight if isinstance(weight, float) else None

    def replayed(self, batch: Any, output: StepOutput) -> StepOutput:
        """Record the outputs of a replayed step, like :meth:`step`."""
        if output.outputs is not None:
            self.step_outputs.append(output.outputs)
        num_graphs = graphs_in(batch.padded if isinstance(batch, PreparedGraphs) else batch)
        known = output.num_samples if num_graphs is None else num_graphs
        return dataclasses.replace(output, outputs=None, num_samples=known)

    @property
    def _adds_up(self) -> bool:
        return getattr(self.loss_fn, "reduction", None) == "sum"

    @property
    def _split_mask(self) -> str:
        return "train_mask" if torch.is_grad_enabled() else self._evaluated_mask

    @contextlib.contextmanager
    def counting_once(self, loader: Any, *, mask: str = "val_mask") -> Iterator[None]:
        """Inside the block, count the rows of a mask and skip the samples that a padding sampler repeats on this
        rank."""
        self._graphs_left, self._evaluated_mask = real_samples(loader), mask
        try:
            yield
        finally:
            self._graphs_left, self._evaluated_mask = None, "val_mask"

    def _without_copies(self, batch: Any, num_graphs: int | None) -> Tensor | None:
        """Return the mask of rows that are not duplicates; None for all."""
        if self._graphs_left is None or num_graphs is None:
            return None
        real, self._graphs_left = self._graphs_left, max(0, self._graphs_left - num_graphs)
        return None if real >= num_graphs else rows_of_first(batch, target_of(batch), real)

    def _weight(self, batch: Any, kept: Tensor | None) -> float | Tensor:
        target, mask = host_of(target_of(batch)), counted_rows(batch, self._split_mask)
        mask = None if mask is None else host_of(mask)
        if kept is not None:
            target, mask = target[kept], None if mask is None else mask[kept]
        if isinstance(self.loss_fn, GraphLoss):
            return as_count(self.loss_fn.count(target, mask))
        return as_count(counted(target, mask).sum())

    def _same_shape(self, pred: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Add a last axis to a 1-D regression target; classes are handled by the loss."""
        if self.task_type not in ("regression", "multilabel"):
            return pred, target
        return aligned(self.task_type, None, pred, target)

    def _loss(self, pred: Any, target: Tensor, mask: Tensor | None) -> Tensor:
        if isinstance(self.loss_fn, GraphLoss):
            if not isinstance(pred, Tensor):
                raise ConfigError(
                    f"it returned a {type(pred).__name__}, and {self.loss_fn!r} needs a tensor; pass your own loss_fn "
                    "that accepts it",
                    argument="model",
                )
            return self.loss_fn(pred, target, mask)
        if mask is not None:
            raise ConfigError(
                "the batch has a mask of its targets (target_mask where it is padded, or train_mask, val_mask, "
                "test_mask), which only losses of get_loss_fn apply; use one of these",
                argument="loss_fn",
                value=self.loss_fn,
            )
        loss: Tensor = in_full_precision(self.loss_fn, pred, target, self.device)
        return loss

    def _refuse_unknown(self, pred: Any, target: Tensor) -> None:
        """Raise ConfigError, before the first step is applied, if a loss does not ignore NaN targets."""
        self._tries_loss = False
        if not isinstance(pred, Tensor):
            return
        with torch.no_grad():
            tried = in_full_precision(self.loss_fn, pred.detach(), target, self.device)
        if bool(tried.isnan().any()):
            raise ConfigError(
                "the batch has NaN (unknown) targets, which make the loss NaN; use a loss of get_loss_fn, which "
                "ignores them, or remove these graphs from the data",
                argument="loss_fn",
                value=self.loss_fn,
            )

    def new_metrics(self) -> FedMetrics:
        """Return the evaluation metrics, reset."""
        self.metrics.reset()
        return self.metrics


def _moved(batch: Any, device: torch.device) -> Any:
    """Move a batch, attaching the number of nodes of each graph, counted on the host."""
    if not _waits_for(device) or isinstance(batch, PaddedGraphBatch):  # whose shapes are static
        return to_device(batch, device)
    sizes = count_sizes(batch)  # before the move, which may be in place
    there = to_device(batch, device)
    if sizes is not None:
        record_sizes(there, sizes)
    return there


def _has_unknown(batch: Any) -> bool:
    """Return whether targets on the host contain NaN; those on a device are not checked, which would synchronise."""
    target = host_of(target_of(batch))
    return target.is_floating_point() and target.device.type == "cpu" and bool(target.isnan().numpy().any())


def _waits_for(device: torch.device) -> bool:
    return device.type != "cpu"


def raw_outputs(model: nn.Module, device: torch.device, batch: Any) -> Any:
    """Return the outputs of a model for a batch, with floating tensors in float32 and padding rows removed."""
    batch = _moved(batch, device)
    without_padding = getattr(batch, "real", None)

    def plain(output: Tensor) -> Tensor:
        output = output.float() if output.is_floating_point() else output
        return output if without_padding is None else without_padding(output)

    return map_nested_tensor(plain, model(batch))


def real_samples(loader: Any) -> int | None:
    """Return the number of this rank's samples before the duplicates at the end; None if there are no duplicates.

    Args:
        loader: any iterable; a ``DataLoader`` with a ``DistributedSampler`` without ``drop_last`` has duplicates.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> sampler = DistributedSampler(range(5), num_replicas=2, rank=1, shuffle=False)
        >>> real_samples(DataLoader(range(5), sampler=sampler)), real_samples([1, 2])
        (2, None)
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None
    length: int = len(sampler.dataset)  # type: ignore[arg-type]  # a map-style data set has a length
    return len(range(sampler.rank, length, sampler.num_replicas))


def graphs_in(batch: Any) -> int | None:
    """Return the number of graphs in a batch, without padding; None if it is unknown or only on a device.

    Example:
        >>> from types import SimpleNamespace
        >>> graphs_in(SimpleNamespace(num_graphs=3, graph_mask=torch.tensor([True, True, False])))
        2
    """
    mask = getattr(batch, "graph_mask", None)
    if isinstance(mask, Tensor):
        # NumPy keeps python, where torch would let the writer of another member's file in.
        return int(np.count_nonzero(mask.numpy())) if mask.device.type == "cpu" else None
    graphs = getattr(batch, "num_graphs", None)
    return graphs if isinstance(graphs, int) else None


def rows_of_first(batch: Any, target: Tensor, num_graphs: int) -> Tensor:
    """Return the mask of target rows that belong to the first graphs of a batch, (rows,) bool.

    Args:
        batch: batch with ``num_graphs``, and ``batch`` and ``pair_index`` if rows are nodes or pairs.
        target: one row per graph, node or pair.
        num_graphs: number of graphs.

    Example:
        >>> from types import SimpleNamespace
        >>> batch = SimpleNamespace(num_graphs=2, batch=torch.tensor([0, 0, 1]))
        >>> rows_of_first(batch, torch.zeros(3), 1)
        tensor([ True,  True, False])
    """
    if len(target) == batch.num_graphs:
        return torch.arange(len(target)) < num_graphs
    graph_of_row: Tensor = batch.batch if len(target) == len(batch.batch) else batch.batch[batch.pair_index[0]]
    return graph_of_row.cpu() < num_graphs
