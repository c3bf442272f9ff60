"""The graph task: a batch of graphs becomes a loss, with its weight and what the metrics of an epoch need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from treadle import distributed
from treadle.device import to_device
from treadle.errors import ConfigError
from treadle.graphs.losses import GraphLoss, get_loss_fn
from treadle.graphs.task_types import aligned
from treadle.nested import map_nested_tensor
from treadle.precision import in_full_precision, widen
from treadle.task import StepOutput
from treadle.weights import as_count, without_empty

LossFn = Callable[..., Tensor]
Outputs = tuple[Tensor, Tensor, Tensor | None]


class EpochMetrics(Protocol):
    """Metrics over an epoch, such as `GraphMetrics` or a collection of torchmetrics."""

    def reset(self) -> Any:
        """Forgets everything."""
        ...

    def update(self, pred: Tensor, target: Tensor) -> Any:
        """Adds a batch; gets a third argument, the mask, where a batch has one."""
        ...

    def compute(self) -> Any:
        """Returns the metrics by name."""
        ...


def target_of(batch: Any) -> Tensor:
    """Returns ``batch.y``, or ``batch.target`` where there is no ``y``.

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
    raise ConfigError(f"batch: a {type(batch).__name__} without targets; it needs a tensor 'y', or 'target'")


class FedMetrics:
    """Gives metrics what a task's outputs hold.

    Args:
        metrics: whom to feed.
        device: where ranks meet.

    Example:
        >>> # FedMetrics(get_metrics("regression"), device).update((pred, target, None))
    """

    def __init__(self, metrics: EpochMetrics, device: torch.device):
        self._metrics = metrics
        self._device = device
        self._fed = 0

    def reset(self) -> None:
        """Forgets everything."""
        self._metrics.reset()
        self._fed = 0

    def update(self, outputs: Outputs) -> None:
        """Adds the outputs of one micro-batch."""
        pred, target, mask = outputs
        self._metrics.update(*((pred, target) if mask is None else (pred, target, mask)))
        self._fed += 1

    def compute(self) -> Mapping[str, Any]:
        """Returns the metrics by name; none where no rank had an output, as with a model that returns no tensor."""
        return dict(self._metrics.compute()) if distributed.agree(self._fed, self._device) else {}


class GraphTask:
    """Supervised learning on graphs, nodes or pairs.

    A batch with a ``target_mask`` (bool, True = counted), as padded batches have, is counted by it.

    Args:
        device: where batches are moved.
        task_type: the kind of task.
        num_classes: of a classification.
        loss_fn: a `GraphLoss`, or any function (prediction, target) -> mean loss.
        metrics: of an evaluation.

    Attributes:
        step_outputs: outputs of the training steps since they were last taken; see `TrainOutputsHook`.

    Example:
        >>> # Engine(model, optimizer, GraphTask(device, "regression", loss_fn, counts=loss_fn, metrics=metrics))
    """

    def __init__(
        self,
        device: torch.device,
        task_type: str,
        num_classes: int | None,
        *,
        loss_fn: LossFn,
        metrics: EpochMetrics,
    ):
        self.device = device
        self.task_type = task_type
        self.loss_fn = loss_fn
        self._counts = loss_fn if isinstance(loss_fn, GraphLoss) else get_loss_fn(task_type, num_classes=num_classes)
        self.metrics = FedMetrics(metrics, device)
        self.step_outputs: list[Outputs] = []

    def step(
        self,
        model: nn.Module,
        batch: Any,
        totals: Mapping[str, float] | None = None,
        generator: torch.Generator | None = None,
    ) -> StepOutput:
        """Returns the loss of a batch, weighted by the entries that count."""
        # Counted, and labels checked, before anything is moved: on the host that waits for no device.
        weight = as_count(self._counts.count(target_of(batch), getattr(batch, "target_mask", None)))
        batch = to_device(batch, self.device)
        target, mask = target_of(batch), getattr(batch, "target_mask", None)
        pred = model(batch)
        if isinstance(pred, Tensor):
            pred, target = self._same_shape(pred, target)
        loss = self._loss(pred, target, mask)
        outputs = None
        if isinstance(pred, Tensor):
            outputs = (widen(pred.detach()), target, mask)
            if torch.is_grad_enabled():
                self.step_outputs.append(outputs)
        graphs = getattr(batch, "num_graphs", None)
        samples = graphs if isinstance(graphs, int) else None
        if getattr(self.loss_fn, "reduction", None) == "sum":
            return StepOutput(loss, reduction="sum", outputs=outputs, num_samples=samples)
        return StepOutput(without_empty(loss, weight), weight=weight, outputs=outputs, num_samples=samples)

    def _same_shape(self, pred: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Gives a 1-D target of a regression its last axis; classes are left to the loss."""
        if self.task_type not in ("regression", "multilabel"):
            return pred, target
        return aligned(self.task_type, None, pred, target)

    def _loss(self, pred: Any, target: Tensor, mask: Tensor | None) -> Tensor:
        if isinstance(self.loss_fn, GraphLoss):
            if not isinstance(pred, Tensor):
                raise ConfigError(
                    f"model: it returned a {type(pred).__name__}, and {self.loss_fn!r} needs a tensor; pass a loss_fn "
                    "of your own that takes it"
                )
            return self.loss_fn(pred, target, mask)
        if mask is not None:
            raise ConfigError(
                f"loss_fn={self.loss_fn!r}: the batch is padded (it has a target_mask), and only a loss of "
                "get_loss_fn leaves padding out"
            )
        loss: Tensor = in_full_precision(self.loss_fn, pred, target, self.device)
        return loss

    def new_metrics(self) -> FedMetrics:
        """Returns the metrics of an evaluation, emptied."""
        self.metrics.reset()
        return self.metrics


def raw_outputs(model: nn.Module, device: torch.device, batch: Any) -> Any:
    """Returns what a model says to a batch, floating tensors in float32 and without the rows that are padding."""
    batch = to_device(batch, device)
    without_padding = getattr(batch, "real", None)

    def plain(output: Tensor) -> Tensor:
        output = output.float() if output.is_floating_point() else output
        return output if without_padding is None else without_padding(output)

    return map_nested_tensor(plain, model(batch))
