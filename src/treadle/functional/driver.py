"""Epoch driver of Trainer: overridden evaluations, two spellings of a metric, a best rule per call."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from treadle import distributed
from treadle.data.amount import FirstBatches
from treadle.engine import Engine
from treadle.engine.base import temporarily
from treadle.engine.epoch_end import run_own_epochs
from treadle.engine.evaluation import (
    EvaluationAbandoned,
    evaluation_mode,
    evaluation_rules,
    refuse_no_batch,
    results_of,
    try_override,
)
from treadle.engine.session import agree_to_stop, claimed_by_hooks, resume_from_hooks
from treadle.engine.signal_exit import SignalsBetweenRuns
from treadle.engine.stopping import Target
from treadle.errors import ConfigError
from treadle.faces.selection import SelectingEpochs
from treadle.functional.metric_rule import PREFIX
from treadle.functional.replaced import EpochBatches, OwnSteps
from treadle.functional.task import EvalTask
from treadle.nested import as_number, flatten_nested_dict

Evaluate = Callable[[Iterable[Any]], Mapping[str, Any]]


class FaceEpochs(SelectingEpochs):
    """Epoch driver whose evaluation and best rule are set by each training call.

    Args:
        engine: runs the steps.
        task: task of evaluations.
        evaluate: returns the evaluation of a subclass or the instance, or None.

    Example:
        >>> # epochs = FaceEpochs(engine, task, evaluate=lambda: None)
    """

    def __init__(self, engine: Engine, task: EvalTask, *, evaluate: Callable[[], Evaluate | None]):
        super().__init__(engine, prefix=PREFIX)
        self._task = task
        self._find_evaluate = evaluate
        self._evaluating = False
        self._epochs_run = 0
        self._wrapped = False  # whether epochs go through the trainer's train_epoch
        self._incomplete = False  # whether train_epoch will add to the running epoch's record
        self._own_steps: OwnSteps | None = None  # steps of a train_epoch that replaces the loop
        self._entered: dict[str, Any] | None = None  # state in which a resumed epoch was entered

    # -- training -------------------------------------------------------------------------------------------------

    def one_epoch(self, train_loader: Iterable[Any], val_loader: Iterable[Any] | None) -> dict[str, Any]:
        """Train the running epoch to its end, or one more; return its record, or only its means if interrupted."""
        if self._own_steps is not None:
            raise ConfigError(
                "the override calls the trainer's own loop in a way that cannot be detected; call it as "
                "super().train_epoch(...)",
                argument="train_epoch",
            )
        if not self._wrapped:  # a single epoch: no selection and no early stopping
            self.select_by(None)
        self.engine.prepare()
        resume_from_hooks(self.engine)  # before the target is set to one epoch beyond the loaded one
        self._put_back()
        before = self.engine.epoch
        self.fit(train_loader, val_loader, before + 1)
        self._epochs_run += 1
        if self.engine.epoch == before:
            return self.train_record(self.engine.train_means())
        return self.history[-1]

    def _put_back(self) -> None:
        """Undo what the override changed at its beginning, in an epoch that began before the checkpoint."""
        entered, self._entered = self._entered, None
        if entered is not None:
            self.engine.state.put_back(self.engine, entered)

    @property
    def record_complete(self) -> bool:
        """Whether the latest record is complete; an overridden ``train_epoch`` may add to it later."""
        return not self._incomplete

    def fit_wrapped(
        self,
        train_epoch: Callable[[Iterable[Any], int], Any],
        loader: Iterable[Any],
        epochs: int,
        after_epoch: Callable[[dict[str, Any]], None],
    ) -> None:
        """Train each epoch with ``train_epoch(loader, epoch)``, which must call :meth:`one_epoch` exactly once.

        Hooks see every epoch as a separate run. Further values returned by ``train_epoch`` are added to the record.

        Raises:
            ConfigError: it did not call it exactly once.
        """
        engine = self.engine
        engine.prepare()
        resume_from_hooks(engine)
        if not engine.cursor.position:  # between two epochs, each a run for its hooks
            engine.state.begin_anew()
        engine.should_stop, self._wrapped = False, True
        self.deadline = engine.settings.limits.deadline()
        last = engine.settings.limits.target(None, epochs)[1] or 0
        try:
            with claimed_by_hooks(engine), SignalsBetweenRuns(engine) as between:
                while engine.epoch < last and not (self.finished or agree_to_stop(engine)):
                    engine.cursor.settle(loader)
                    record = self._run_wrapped_epoch(partial(train_epoch, loader))
                    with between.handled():
                        if record is not None:
                            self._incomplete = False
                            after_epoch(record)
                            self._save_completed()
        finally:
            self._wrapped = self._incomplete = False
            self.deadline = None

    def _save_completed(self) -> None:
        """Let hooks save the end of an epoch whose record was incomplete when its run ended."""
        for hook in self.engine.hooks:
            hook._save_end(self.engine)

    def _run_wrapped_epoch(self, train_epoch: Callable[[int], Any]) -> dict[str, Any] | None:
        """Train one epoch; return its record, or None if stopped within it."""
        self._incomplete = True
        before, self._epochs_run = self.engine.epoch, 0
        self._entered = self.engine.state_dict() if self.engine.cursor.position else None
        result = train_epoch(before)
        if self._epochs_run != 1 or not isinstance(result, Mapping):
            raise ConfigError(
                f"the override called super().train_epoch() {self._epochs_run} times and returned a "
                f"{type(result).__name__}; call it once and return a dict of numbers",
                argument="train_epoch",
            )
        if self.engine.epoch == before:  # stopped within the epoch
            return None
        record = self.history[-1]
        record.update(_as_record({key: value for key, value in result.items() if key not in record}, prefix=""))
        return record

    def fit_replaced(
        self,
        train_epoch: Callable[[Iterable[Any], int], Any],
        loaders: tuple[Iterable[Any], Iterable[Any] | Mapping[str, Iterable[Any]] | None],
        epochs: int,
        after_epoch: Callable[[dict[str, Any]], None],
    ) -> None:
        """Train each epoch with ``train_epoch(batches, epoch)``, a user's loop.

        The batches come from the cursor, so that the position is saved and restored as in the engine's loop. An epoch
        resumed after its last batch is evaluated without calling the loop, which has nothing to read.

        Args:
            train_epoch: the loop.
            loaders: training loader, and evaluation loader or None.
            epochs: absolute target.
            after_epoch: called with each record.

        Raises:
            ConfigError: it read no batch, or did not return a dict.
        """
        engine, result = self.engine, dict[str, Any]()
        own_steps = OwnSteps(engine)

        def one_epoch() -> bool:
            own_steps.start()
            result.clear()
            engine.cursor.settle(loaders[0])
            batches = EpochBatches(engine, loaders[0], on_resumed=self._put_back)
            if batches.left:
                self._entered = engine.state_dict() if batches.before else None
                result.update(self._result_of(train_epoch(batches, engine.epoch)))
            elif loaders[1] is not None:
                found = self.evaluate_each(loaders[1])
                result.update({f"{PREFIX}{name}": value for name, value in found.items()})
            if batches.before:
                self._use_loss_of_all_steps(result, batches.before)
            own_steps.stop()
            return own_steps.observer.schedule_stepped

        target = Target(
            epochs=epochs,
            score_epoch=lambda: self._score_result(result),
            after_epoch=lambda: after_epoch(self.history[-1]),
        )
        self._own_steps = own_steps
        try:
            run_own_epochs(engine, target, one_epoch)
        finally:
            own_steps.close()
            self._own_steps = None

    def _use_loss_of_all_steps(self, result: dict[str, Any], before: int) -> None:
        """Use the engine's loss for an epoch resumed in the middle, since the engine counted all steps."""
        engine = self.engine
        if "loss" in engine.train_means():
            result.pop("loss", None)
            result.pop("train_loss", None)
        engine.logger.warning(
            "epoch %d: resumed after %d batches, which the override of train_epoch does not see again. train_loss is "
            "the mean of all steps that went through train_step; other values from the override cover only the rest",
            engine.epoch + 1, before,
        )  # fmt: skip

    def _result_of(self, result: Any) -> dict[str, Any]:
        if not isinstance(result, Mapping):
            raise ConfigError(
                f"the override returned a {type(result).__name__}; return a dict of numbers with train_loss",
                argument="train_epoch",
            )
        if self.engine.cursor.position == 0:
            raise ConfigError(
                "the override read no batch of the given train_dataloader; an epoch consists of the batches read "
                "from it",
                argument="train_epoch",
            )
        return _as_record(result, prefix="")

    def _score_result(self, result: Mapping[str, Any]) -> float:
        """Append the record of an epoch trained by an override; return the value for plateau schedulers."""
        means = self.train_record(self.engine.train_means())
        loss = {"train_loss": result.get("train_loss", result.get("loss", means["train_loss"]))}
        numbers = {name: value for name, value in result.items() if name not in ("epoch", "loss", "train_loss", "lr")}
        rates = self.engine.last_lr
        record = {
            "epoch": self.engine.epoch + 1,
            **means,
            **loss,
            **numbers,
            "lr": float(rates[0]) if rates else math.nan,
        }
        value = float(record.get(f"{PREFIX}loss", record["train_loss"]))
        if self.best is not None:
            value = self.best.value_in(record)
            self.improved = self.best.update(record["epoch"], value)
        self.history.append(record)
        return value

    def train_record(self, means: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``train_loss``, and ``train_<name>`` for values added by an overridden ``train_step``."""
        added = flatten_nested_dict(means.get("records", {}))
        return {**super().train_record(means), **{f"train_{'/'.join(path)}": value for path, value in added.items()}}

    # -- evaluation -----------------------------------------------------------------------------------------------

    def evaluate(self, loader: Iterable[Any]) -> dict[str, Any]:
        """Return the results of the current evaluation, without the prefix, as plain numbers."""
        own_evaluate = self._find_evaluate()
        if own_evaluate is None:
            return self.measure(loader)
        limit = self.engine.settings.limits.evaluation
        with self.scored_weights(), self._inside_the_rules(loader), temporarily(self, _evaluating=True):
            first = loader if limit is None else FirstBatches(loader, limit, "limit_eval_batches")
            values = results_of("evaluate", own_evaluate(first))
        return _as_record(values)

    def _try_evaluation(self, val_loader: Iterable[Any]) -> list[str] | None:
        """Evaluate one batch before step 1, with the task or an overridden ``evaluate``."""
        own_evaluate = self._find_evaluate()
        with temporarily(self, _evaluating=True):
            names = self._try_batch(val_loader, self._task if own_evaluate is None else None)
            if own_evaluate is not None and not isinstance(val_loader, Iterator):
                with self.scored_weights(), self._inside_the_rules(val_loader):
                    first = FirstBatches(val_loader, 1, "limit_eval_batches")
                    found = try_override(
                        lambda: _as_record(results_of("evaluate", own_evaluate(first))), self.engine.logger
                    )
                self._warn_of_absent_metric(found)
        return ["loss", *names] if names is not None and self._task.gives_loss else names

    def _warn_of_absent_metric(self, found: Mapping[str, Any] | None) -> None:
        """Warn if an overridden evaluation did not return the metric to select by for the first batch."""
        metric = "train_" if self.best is None else self.best.metric
        bare = metric.removeprefix(PREFIX)
        if found is not None and bare not in found and bare != "lr" and not metric.startswith("train_"):
            self.engine.logger.warning(
                "evaluate: the override returned %s for the first batch, but the best epoch is selected by %s; "
                "return that too, or pass best_model_metric=", ", ".join(sorted(found)) or "nothing", metric,
            )  # fmt: skip

    def _check_names(self, names: Mapping[str, list[str] | None]) -> None:
        """Raise if the metric to select by will be missing from epoch records.

        Raises:
            ConfigError: the metric is not among the results of the first batches.
        """
        known = {f"{loader}_{name}" if loader else name for loader, found in names.items() for name in found or ()}
        metric = "train_" if self.best is None else self.best.metric
        bare = metric.removeprefix(PREFIX)
        if None in names.values() or bare == "lr" or metric.startswith("train_"):
            return
        if bare not in {name.removeprefix(PREFIX) for name in known}:
            there = ", ".join(sorted(PREFIX + name.removeprefix(PREFIX) for name in known))
            raise ConfigError(
                f"epoch records will not contain it; they will contain {there}, and train_loss",
                argument="best_model_metric", value=metric,
            )  # fmt: skip

    def measure(self, loader: Iterable[Any]) -> dict[str, Any]:
        """Return the weighted means over a loader from the engine's evaluation.

        Raises:
            ConfigError: the loader is empty.
        """
        with self.scored_weights(), temporarily(self, _evaluating=True):
            values = self.engine.evaluate(loader, self._task)
            if not self._task.gives_loss:
                values.pop("loss")
        refuse_no_batch(self.engine.eval_cursor.position, "evaluate: the loader")
        return _as_record(values)

    def loss_of(self, batch: Any) -> float:
        """Return the loss of one batch under the rules of an evaluation; NaN if its weight is 0."""
        engine = self.engine
        rules = (
            evaluation_mode(engine.model)
            if self._evaluating
            else evaluation_rules(engine.model, (), eval_seed=engine.eval_seed)
        )
        with rules, engine.precision.autocast():
            loss = engine.task.step(engine.model, batch).loss
        return math.nan if loss is None else float(loss)

    @contextlib.contextmanager
    def _inside_the_rules(self, loader: Iterable[Any]) -> Iterator[None]:
        """Apply the rules of an evaluation around a user's loop."""
        engine = self.engine

        def exit_on_signal(*_: Any) -> None:
            # Ranks that evaluate in a user's loop have no common point to stop at: the signal waits.
            if engine.exit_plans and engine.signals.received and distributed.world_size() == 1:
                raise EvaluationAbandoned

        handle = engine.model.register_forward_pre_hook(exit_on_signal)
        try:
            with evaluation_rules(engine.model, loader, eval_seed=engine.eval_seed), engine.precision.autocast():
                yield
        finally:
            handle.remove()

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint entries of the epoch driver; ``metrics`` is the last epoch's record."""
        return {**super().state_dict(), "metrics": dict(self.history[-1]) if self.history else None}


def _as_record(values: Mapping[str, Any], *, prefix: str = PREFIX) -> dict[str, Any]:
    """Flatten results, without the prefix and with 0-d tensors as numbers.

    Raises:
        ConfigError: a value is not a number, or a name appears both with and without the prefix.
    """
    record: dict[str, Any] = {}
    for path, value in flatten_nested_dict(values).items():
        name = "/".join(path).removeprefix(prefix)
        if name in record:
            raise ConfigError(
                f"{name!r} and '{PREFIX}{name}' become one key in the record; return one of them", argument="evaluate"
            )
        try:
            record[name] = value if isinstance(value, list) else float(as_number(path, value))
        except TypeError as error:
            raise ConfigError(str(error)) from error
    return record
