"""Interface between the engine and user code: a Task that turns a batch into a loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from treadle.errors import ConfigError
from treadle.means import RunningMeans
from treadle.nested import as_number

Totals = Mapping[str, float] | None
"""Counts of each loss term over all micro-batches and ranks of a step; None if a task counts none."""
Rng = torch.Generator | None
"""Generator of an evaluation, which draws the same numbers each time; None in training."""


@dataclass(frozen=True)
class StepOutput:
    """Result of one micro-batch.

    Attributes:
        loss: 0-d tensor; None when the micro-batch contributes nothing.
        records: nested dict of numbers, 0-d tensors, ``Weighted`` or ``Total``.
        weight: number of elements the loss is a mean over; None counts 1 per micro-batch.
        reduction: ``"mean"`` divides the gradients by the total weight; ``"sum"`` adds them up.
        outputs: ``(prediction, target)`` for epoch metrics, or None.
        num_samples: samples in the micro-batch, for rates in progress displays only.

    Example:
        >>> StepOutput(torch.tensor(0.5), {"accuracy": 0.75}, weight=8).reduction
        'mean'
    """

    loss: Tensor | None
    records: Mapping[str, Any] = field(default_factory=dict)
    weight: float | Tensor | None = None
    reduction: Literal["mean", "sum"] = "mean"
    outputs: Any = None
    num_samples: int | None = None


class Task(Protocol):
    """Loss for one kind of data.

    A task may have further methods:

    * ``new_metrics()`` returns the metrics of an epoch, see :class:`Metrics`.
    * ``weights(batch)`` returns the count of each term of a loss that is a sum of means over different counts; it is
      computable without the model. ``step`` divides the sum of each term by ``totals``, so the losses of the
      micro-batches add up to the loss of the step; that sum is reported.
    * ``prepare_batch(model, batch)`` runs the host's part of a training step, such as drawing a mask, which a captured
      step excludes. It returns tensors, or tuples, dicts or a dataclass of them, of the same shapes in every step, and
      the weight of the step if the host knows it, else None. ``step`` accepts the former in place of a batch.
    * ``replayed(batch, output)`` processes a replay, which does not call ``step``: the batch from ``prepare_batch`` and
      copies of the step's results. It returns the output, updated with what the host knows.

    Example:
        >>> class Regression:
        ...     def step(self, model, batch, totals=None, generator=None):
        ...         x, y = batch
        ...         return StepOutput((model(x) - y).square().mean(), weight=len(x))
    """

    def step(self, model: nn.Module, batch: Any, totals: Totals = None, generator: Rng = None) -> StepOutput:
        """Turn a batch into a loss, in training and evaluation alike."""
        ...


class Metrics(Protocol):
    """Epoch metrics over all outputs, such as a torchmetrics collection.

    ``update`` takes the outputs of a micro-batch as one argument, or prediction and target separately.
    """

    def reset(self) -> None:
        """Clear the state."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Add the outputs of one micro-batch."""

    def compute(self) -> Mapping[str, Any]:
        """Return the metrics as numbers."""


@runtime_checkable
class HasMetrics(Protocol):
    """Task with epoch metrics."""

    def new_metrics(self) -> Metrics:
        """Return a fresh metrics object."""
        ...


@runtime_checkable
class TakesMetrics(Protocol):
    """Task that can feed outputs and targets to metrics although its own step returns none."""

    @property
    def loss_fn(self) -> Any:
        """Loss function of outputs and targets, or None."""
        ...

    def with_metrics(self, metrics: Any) -> Task:
        """Return a task that evaluates these metrics."""
        ...


def update_of(metrics: Metrics) -> Callable[[Any], Any]:
    """Return a function that passes the outputs of a micro-batch to ``metrics.update``.

    If ``update`` takes several arguments, as in torchmetrics, a tuple or list is passed by position and a mapping by
    name.

    Example:
        >>> class Count:
        ...     def update(self, prediction, target): print(prediction, target)
        >>> update = update_of(Count())
        >>> update((1, 2)); update({"target": 2, "prediction": 1})
        1 2
        1 2
    """
    if not _takes_several(metrics):
        return metrics.update

    def update(outputs: Any) -> Any:
        if isinstance(outputs, Mapping):
            return metrics.update(**outputs)
        return metrics.update(*outputs) if isinstance(outputs, (tuple, list)) else metrics.update(outputs)

    return update


def _takes_several(metrics: Metrics) -> bool:
    try:
        signature = inspect.signature(metrics.update)
    except (TypeError, ValueError):  # not written in Python
        return False
    if next((each.kind for each in signature.parameters.values()), None) is inspect.Parameter.VAR_POSITIONAL:
        return True
    try:
        signature.bind(None)
    except TypeError:
        return True
    return False


def as_step_output(result: Any, *, training: bool) -> StepOutput:
    """Convert the result of a forward pass to a StepOutput and check its loss.

    Args:
        result: the loss, ``(loss, records)``, ``(loss, records, weight)`` or a StepOutput.
        training: whether the loss must require grad.

    Raises:
        ConfigError: the loss is not a 0-d tensor or, in training, does not require grad; or the reduction is unknown.

    Example:
        >>> as_step_output((None, {"n": 1}), training=True).records
        {'n': 1}
    """
    if isinstance(result, StepOutput):
        output = result
    elif isinstance(result, tuple) and len(result) in (2, 3):
        output = StepOutput(*result)
    elif isinstance(result, Tensor):
        output = StepOutput(result)
    else:
        raise ConfigError(
            f"the forward step returned a {type(result).__name__}; return the loss, (loss, records), "
            "(loss, records, weight) or a StepOutput"
        )
    if output.reduction not in ("mean", "sum"):
        raise ConfigError(
            "must be 'mean' or 'sum', the reduction of the loss", argument="reduction", value=output.reduction
        )
    weight = output.weight
    if weight is not None and type(weight) is not Tensor and (type(weight) is not float or not weight >= 0):
        _check_weight(weight)
    if type(output.records) is not dict and not isinstance(output.records, (Mapping, type(None))):
        raise ConfigError("must be a dict of numbers by name, or None", argument="records", value=output.records)
    loss = output.loss
    if loss is None:
        return output
    if not isinstance(loss, Tensor):
        fix = "float() and .item() cut it off from the weights" if isinstance(loss, Real) else "return the loss alone"
        raise ConfigError(f"expected a 0-d tensor or None, got {type(loss).__name__}; {fix}", argument="loss")
    if loss.dim() != 0:
        raise ConfigError(
            f"expected a 0-d tensor or None, got {tuple(loss.shape)}; reduce it, for example with .mean()",
            argument="loss",
        )
    if training and not loss.requires_grad:
        raise ConfigError(
            f"a tensor of shape {tuple(loss.shape)} that does not require grad cannot train; "
            "was it detached or computed under no_grad, or are all parameters frozen?",
            argument="loss",
        )
    return output


def _check_weight(weight: Any) -> None:
    if isinstance(weight, Tensor):
        return
    if isinstance(weight, bool) or not isinstance(weight, Real) or not float(weight) >= 0:
        raise ConfigError(
            "must be the number of elements the loss averages over, >= 0, or None for 1 per micro-batch",
            argument="weight",
            value=weight,
        )


def add_output(means: RunningMeans, output: StepOutput) -> None:
    """Add the loss and records of a micro-batch to running means, using its weight and reduction."""
    weight = 1.0 if output.weight is None else output.weight
    if type(weight) is not float:
        weight = as_number(("weight",), weight)
    if output.loss is not None:
        if output.reduction == "sum":
            means.add_total(("loss",), output.loss)
        else:
            means.add_value(("loss",), output.loss, weight)
    if output.records:
        means.add(output.records, weight, below=("records",))
