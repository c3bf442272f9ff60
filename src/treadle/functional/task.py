"""What the engine asks for a batch, answered by the trainer's own methods, so that overriding one takes effect."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from treadle.functional.batches import num_samples, split_batch
from treadle.functional.losses import model_loss
from treadle.functional.metrics import EpochMetrics
from treadle.means import Total
from treadle.nested import map_nested_tensor
from treadle.precision import widen
from treadle.task import StepOutput
from treadle.weights import without_empty

if TYPE_CHECKING:
    from treadle.functional.trainer import Trainer


class TrainerTask:
    """A batch becomes a loss through ``_prepare_batch``, ``_forward_pass``, ``_compute_loss`` and ``_loss_weight``.

    Args:
        trainer: has the methods.
        metrics: of an evaluation.

    Example:
        >>> # Engine(model, optimizer, TrainerTask(trainer, EpochMetrics(None, device)))
    """

    def __init__(self, trainer: Trainer, metrics: EpochMetrics):
        self.trainer = trainer
        self.metrics = metrics

    def step(
        self,
        model: nn.Module,
        batch: Any,
        totals: Mapping[str, float] | None = None,
        generator: torch.Generator | None = None,
    ) -> StepOutput:
        """Returns the loss of a batch with its weight."""
        trainer = self.trainer
        inputs, targets = trainer._prepare_batch(batch)
        outputs = trainer._forward_pass(inputs)
        loss = trainer._compute_loss(outputs, targets)
        if trainer._counts_on_host:  # before anything was moved, so that counting waits for no device
            counted_inputs, counted_targets = split_batch(batch)
        else:
            counted_inputs, counted_targets = inputs, targets
        weight = trainer._loss_weight(counted_inputs, outputs, counted_targets)
        return self._output(loss, weight, inputs, outputs, targets)

    def _output(self, loss: Tensor, weight: float | Tensor, inputs: Any, outputs: Any, targets: Any) -> StepOutput:
        samples = num_samples(inputs)
        kept = (_prediction(outputs), _target(inputs, targets)) if self.metrics else None
        if _adds_up(self.trainer, outputs):
            return StepOutput(loss, reduction="sum", outputs=kept, num_samples=samples)
        return StepOutput(without_empty(loss, weight), weight=weight, outputs=kept, num_samples=samples)

    def new_metrics(self) -> EpochMetrics:
        """Returns the metrics of an evaluation, emptied."""
        self.metrics.reset()
        return self.metrics


class OverriddenEvalTask(TrainerTask):
    """Evaluates through the ``eval_step`` that a subclass wrote; its numbers are averaged with the loss's weight."""

    def step(
        self,
        model: nn.Module,
        batch: Any,
        totals: Mapping[str, float] | None = None,
        generator: torch.Generator | None = None,
    ) -> StepOutput:
        """Returns the numbers of ``eval_step`` as records."""
        trainer = self.trainer
        with _watched(trainer) as seen:
            numbers: dict[str, Any] = dict(trainer.eval_step(batch))
        if "inputs" not in seen:
            seen["inputs"], seen["targets"] = trainer._prepare_batch(batch)
        inputs, outputs, targets = seen["inputs"], seen.get("outputs"), seen.get("targets")
        weight = trainer._loss_weight(inputs, outputs, targets)
        if "loss" in numbers and _adds_up(trainer, outputs):
            numbers["loss"] = Total(numbers["loss"])
        kept = (_prediction(outputs), _target(inputs, targets)) if self.metrics and outputs is not None else None
        return StepOutput(None, numbers, weight=weight, outputs=kept, num_samples=num_samples(inputs))


@contextlib.contextmanager
def _watched(trainer: Trainer) -> Iterator[dict[str, Any]]:
    """Notes what passes through the trainer's methods in the block, whoever wrote them and whoever calls them."""
    seen: dict[str, Any] = {}
    prepare, forward, compute = trainer._prepare_batch, trainer._forward_pass, trainer._compute_loss

    def prepare_and_note(batch: Any) -> tuple[Any, Any]:
        seen["inputs"], seen["targets"] = prepared = prepare(batch)
        return prepared

    def forward_and_note(inputs: Any) -> Any:
        seen["inputs"], seen["outputs"] = inputs, forward(inputs)
        return seen["outputs"]

    def compute_and_note(outputs: Any, targets: Any) -> Tensor:
        seen["outputs"], seen["targets"] = outputs, targets
        return compute(outputs, targets)

    notes = {"_prepare_batch": prepare_and_note, "_forward_pass": forward_and_note, "_compute_loss": compute_and_note}
    own = {name: vars(trainer)[name] for name in notes if name in vars(trainer)}
    vars(trainer).update(notes)
    try:
        yield seen
    finally:
        for name in notes:
            del vars(trainer)[name]
        vars(trainer).update(own)


def _adds_up(trainer: Trainer, outputs: Any) -> bool:
    """Returns whether the loss is a sum over the batch, not a mean."""
    return model_loss(outputs) is None and getattr(trainer.loss_fn, "reduction", None) == "sum"


def _prediction(outputs: Any) -> Any:
    logits = None if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    return map_nested_tensor(lambda tensor: widen(tensor.detach()), outputs if logits is None else logits)


def _target(inputs: Any, targets: Any) -> Any:
    if targets is None and isinstance(inputs, Mapping):
        return inputs.get("labels")
    return targets
