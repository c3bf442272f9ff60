"""Tasks that call the trainer's methods, so that overrides take effect."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from treadle.engine.evaluation import results_of
from treadle.engine.metrics import EpochMetrics
from treadle.functional.batches import num_samples, split_batch
from treadle.functional.losses import counted_labels, model_loss, num_counted, refuse_broadcast
from treadle.functional.row_counts import RowCounts
from treadle.means import Total, Weighted
from treadle.nested import map_nested_tensor
from treadle.optim.loss_weights import without_empty
from treadle.optim.precision import widen
from treadle.task import Rng, StepOutput, Totals

if TYPE_CHECKING:
    from treadle.functional.trainer import Trainer


class TrainerTask:
    """Task of the methods ``_prepare_batch``, ``_forward_pass``, ``_compute_loss`` and ``_loss_weight``.

    Args:
        trainer: trainer with the methods.

    Example:
        >>> # Engine(model, optimizer, TrainerTask(trainer))
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self._has_own_loss: dict[tuple[bool, bool], bool] = {}
        self._num_counted: float | Tensor | None = None  # of the last batch, if different from the weight of its loss
        self._row_counts = RowCounts(self._counted_labels)

    def step(self, model: nn.Module, batch: Any, totals: Totals = None, generator: Rng = None) -> StepOutput:
        """Return the loss of a batch with its weight."""
        trainer = self.trainer
        inputs, targets = trainer._prepare_batch(batch)
        try:
            outputs = trainer._forward_pass(inputs)
        except TypeError as error:
            _explain_keywords(error, inputs)
            raise
        loss = trainer._compute_loss(outputs, targets)
        if trainer._counts_on_host:  # before anything is moved, so that counting needs no device sync
            counted_inputs, counted_targets = split_batch(batch)
        else:
            counted_inputs, counted_targets = inputs, targets
        weight = self.weigh(batch, counted_inputs, outputs, counted_targets)
        own, kind = model_loss(outputs) is not None, _batch_structure(inputs, targets)
        if kind not in self._has_own_loss and not trainer._overrides("_compute_loss"):
            refuse_broadcast(trainer.loss_fn, outputs, targets)
        self._has_own_loss[kind] = own
        self.count(outputs, counted_targets, weight)
        kept, samples = self.kept_for_metrics(inputs, outputs, targets), num_samples(inputs)
        if _is_summed(trainer, outputs):
            return StepOutput(loss, reduction="sum", outputs=kept, num_samples=samples)
        return StepOutput(without_empty(loss, weight), weight=weight, outputs=kept, num_samples=samples)

    @property
    def loss_fn(self) -> Any:
        """Loss function of the trainer, or None."""
        return self.trainer.loss_fn

    def with_metrics(self, metrics: EpochMetrics) -> EvalTask:
        """Return an evaluation task that feeds outputs and targets to metrics."""
        return type(self.trainer._eval_task)(self.trainer, metrics)

    def count(self, outputs: Any, targets: Any, weight: float | Tensor) -> None:
        """Record the number of elements for values other than the loss, unless the trainer weights losses itself."""
        own = self.trainer._overrides("_loss_weight")
        counted = None if own else num_counted(self.trainer.loss_fn, outputs, targets)
        self._num_counted = weight if counted is None and _is_summed(self.trainer, outputs) else counted

    def weighted(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Return numbers of the last batch with their weight, which may differ from the loss's."""
        count = self._num_counted
        if count is None:
            return dict(numbers)

        def one(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: one(inner) for name, inner in value.items()}
            return value if isinstance(value, (Total, Weighted)) else Weighted(value, count)

        return {name: value if name == "loss" else one(value) for name, value in numbers.items()}

    def prepare_batch(self, model: nn.Module, batch: Any) -> tuple[Any, float | None]:
        """Count the elements that the loss of a batch averages over, if the host can before the model runs.

        Whether the model computes its own loss is known from an earlier batch of the same kind.
        """
        if not self.trainer._counts_on_host:
            return batch, None
        inputs, targets = split_batch(batch)
        own = self._has_own_loss.get(_batch_structure(inputs, targets))
        outputs = {"loss": 0.0} if own else None
        if own is None or _is_summed(self.trainer, outputs):
            return batch, None
        weight = self.weigh(batch, inputs, outputs, targets)
        return batch, None if isinstance(weight, Tensor) else weight

    def weigh(self, batch: Any, inputs: Any, outputs: Any, targets: Any) -> float | Tensor:
        """Return the weight of a loss, without reading a TensorLoader's batch if possible."""
        known = self.known_weight(batch, outputs) if self.trainer._counts_on_host else None
        return self.trainer._loss_weight(inputs, outputs, targets) if known is None else known

    def known_weight(self, batch: Any, outputs: Any) -> float | None:
        """Return the number of counted labels of a TensorLoader's batch; None if the batch must be read."""
        engine, loss_fn = self.trainer._engine, self.trainer.loss_fn
        for given, ids in zip(engine.attempt.group.batches, engine.attempt.group.sample_ids):  # noqa: B905  (few have ids)
            if given is batch:
                settings = (getattr(loss_fn, name, None) for name in ("reduction", "ignore_index"))
                rule = id(loss_fn), getattr(loss_fn, "weight", None) is None, *settings
                return self._row_counts.of(batch, engine.cursor.loader, ids, outputs=outputs, rule=rule)
        return None

    def _counted_labels(self, inputs: Any, outputs: Any, targets: Any) -> Tensor | None:
        trainer = self.trainer
        return counted_labels(trainer.model, trainer.loss_fn, inputs=inputs, outputs=outputs, targets=targets)

    def kept_for_metrics(self, inputs: Any, outputs: Any, targets: Any) -> tuple[Any, Any] | None:
        """Return ``(prediction, target)`` if there are metrics; training has none."""
        return None


def _explain_keywords(error: TypeError, inputs: Any) -> None:
    """Add a note to an error of the model's arguments if the batch was passed to it as keyword arguments."""
    if isinstance(inputs, Mapping) and hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(
            f"the batch is a dict, so the model was called with its keys as keyword arguments: {', '.join(inputs)}; "
            "override _prepare_batch(batch) of the trainer to return (inputs, targets)"
        )


class EvalTask(TrainerTask):
    """Task of evaluations with metrics.

    Args:
        trainer: trainer with the methods.
        metrics: metrics updated with every batch.

    Attributes:
        gives_loss: whether the current evaluation returns a loss.
    """

    def __init__(self, trainer: Trainer, metrics: EpochMetrics):
        super().__init__(trainer)
        self.metrics = metrics
        self.gives_loss = True

    def known_weight(self, batch: Any, outputs: Any) -> float | None:
        """Return None: the batches of an evaluation are not micro-batches of a step."""
        return None

    def kept_for_metrics(self, inputs: Any, outputs: Any, targets: Any) -> tuple[Any, Any] | None:
        """Return ``(prediction, target)``: logits if the outputs have them, and labels if there is no target."""
        if not self.metrics or outputs is None:
            return None
        logits = None if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
        prediction = map_nested_tensor(lambda tensor: widen(tensor.detach()), outputs if logits is None else logits)
        target = inputs.get("labels") if targets is None and isinstance(inputs, Mapping) else targets
        return prediction, target

    def new_metrics(self) -> EpochMetrics:
        """Return the metrics of an evaluation, reset."""
        self.metrics.reset()
        return self.metrics


class OverriddenEvalTask(EvalTask):
    """Evaluation task of a subclass's ``eval_step``, whose numbers are averaged with the loss's weight."""

    def step(self, model: nn.Module, batch: Any, totals: Totals = None, generator: Rng = None) -> StepOutput:
        """Return the numbers of ``eval_step`` as records."""
        trainer = self.trainer
        with _calls_recorded(trainer) as seen:
            numbers = dict(results_of("eval_step", trainer.eval_step(batch)))
        if "inputs" not in seen:
            seen["inputs"], seen["targets"] = trainer._prepare_batch(batch)
        inputs, outputs, targets = seen["inputs"], seen.get("outputs"), seen.get("targets")
        weight = trainer._loss_weight(inputs, outputs, targets)
        self.count(outputs, targets, weight)
        numbers = self.weighted(numbers)
        self.gives_loss = self.gives_loss or "loss" in numbers
        if "loss" in numbers and _is_summed(trainer, outputs):
            numbers["loss"] = Total(numbers["loss"])
        kept = self.kept_for_metrics(inputs, outputs, targets)
        return StepOutput(None, numbers, weight=weight, outputs=kept, num_samples=num_samples(inputs))

    def new_metrics(self) -> EpochMetrics:
        """Return the metrics of an evaluation, reset; the override decides whether there is a loss."""
        self.gives_loss = False
        return super().new_metrics()


@contextlib.contextmanager
def _calls_recorded(trainer: Trainer) -> Iterator[dict[str, Any]]:
    """Record calls of the trainer's methods inside the block, overridden or not."""
    seen: dict[str, Any] = {}
    prepare, forward, compute = trainer._prepare_batch, trainer._forward_pass, trainer._compute_loss

    def record_prepared(batch: Any) -> tuple[Any, Any]:
        seen["inputs"], seen["targets"] = prepared = prepare(batch)
        return prepared

    def record_outputs(inputs: Any) -> Any:
        seen["inputs"], seen["outputs"] = inputs, forward(inputs)
        return seen["outputs"]

    def record_loss_inputs(outputs: Any, targets: Any) -> Tensor:
        seen["outputs"], seen["targets"] = outputs, targets
        return compute(outputs, targets)

    notes = {"_prepare_batch": record_prepared, "_forward_pass": record_outputs, "_compute_loss": record_loss_inputs}
    own = {name: vars(trainer)[name] for name in notes if name in vars(trainer)}
    vars(trainer).update(notes)
    try:
        yield seen
    finally:
        for name in notes:
            del vars(trainer)[name]
        vars(trainer).update(own)


def _batch_structure(inputs: Any, targets: Any) -> tuple[bool, bool]:
    """Return a key of the batch's structure: a model may compute its loss only without targets, or only with labels."""
    return targets is None, isinstance(inputs, Mapping) and "labels" in inputs


def _is_summed(trainer: Trainer, outputs: Any) -> bool:
    """Return whether the loss is a sum over the batch instead of a mean."""
    return model_loss(outputs) is None and getattr(trainer.loss_fn, "reduction", None) == "sum"
