"""Epoch driver: train, evaluate, best rule, history. It runs on the engine and adds no training loop."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from treadle.checkpoint.introspection import is_user_class
from treadle.data.amount import FirstBatches
from treadle.engine import Engine
from treadle.engine.best import BestRule
from treadle.engine.evaluation import refuse_no_batch, results_of, try_override
from treadle.engine.limits import Deadline
from treadle.engine.predictions import predicted, scored_weights
from treadle.engine.preflight import try_evaluation
from treadle.errors import ConfigError
from treadle.errors.arguments import checked
from treadle.faces.loaders import refuse_used_up, require_equal_on_ranks
from treadle.optim.evaluation_point import has_modes
from treadle.optim.schedules import check_plateau
from treadle.task import Task


class EpochTrainer:
    """Trainer to an absolute number of epochs that keeps one record per epoch.

    Args:
        engine: runs the steps.
        best: rule that selects the best epoch and stops early; None does neither.
        prefix: prefix of the names of evaluation results in a record.

    Attributes:
        history: list of records; each has ``epoch`` (1-based), ``train_loss``, the evaluation results and ``lr``.
        metrics: results of the last evaluation, without the prefix; None before the first.
        improved: whether the last epoch was an improvement.
        loss_name: name of the loss in records, after ``train_`` or the prefix; a front end may change it.

    Example:
        >>> # trainer = EpochTrainer(engine, best=BestRule("val_loss"))
        >>> # trainer.fit(train_loader, val_loader, epochs=10)
    """

    loss_name = "loss"

    @checked
    def __init__(self, engine: Engine, *, best: BestRule | None = None, prefix: str = "val_"):
        self.engine = engine
        self.best = best
        self.prefix = prefix
        self.history: list[dict[str, Any]] = []
        self.metrics: dict[str, Any] | None = None
        self.improved = False
        self._scoring = False  # whether an evaluation is running or has failed
        self.deadline: Deadline | None = None  # deadline of a call that runs the engine several times
        engine.state_parts.append(self)

    def fit(
        self,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | Mapping[str, Iterable[Any]] | None,
        epochs: int,
        *,
        after_epoch: Callable[[dict[str, Any]], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Train until ``epochs`` epochs are completed or the best rule stops; a finished run is a no-op.

        Args:
            train_loader: micro-batches for training.
            val_loader: micro-batches for evaluation, a dict of loaders evaluated under their names, or None.
            epochs: absolute target.
            after_epoch: called with the epoch's record after ``on_after_epoch``, for checkpoints and user callbacks.

        Returns:
            The history.

        Raises:
            ConfigError: the mode of a ReduceLROnPlateau contradicts the direction of the best rule's metric or of the
                loss.
        """
        metric, mode = ("the loss", "min") if self.best is None else (self.best.metric, self.best.mode)
        check_plateau(self.engine.lr_scheduler, metric, mode)
        refuse_used_up(val_loader, "val_loader", times=epochs - self.engine.epoch)
        names = sorted(val_loader) if isinstance(val_loader, Mapping) else "given"
        require_equal_on_ranks(epochs=epochs, evaluation_loader=None if val_loader is None else names)
        if after_epoch is not None:
            self.engine.prepare()
            self.engine.state.objects.add("after_epoch", after_epoch)
        if val_loader is not None:
            self.engine.state.try_before_step_1(lambda: self._try_before_step_1(val_loader))
        self.engine.run(
            train_loader,
            epochs=epochs,
            score_epoch=lambda: self._score(val_loader),
            after_epoch=None if after_epoch is None else lambda: after_epoch(self.history[-1]),
            deadline=self.deadline,
        )
        return self.history

    def train_epoch(self, loader: Iterable[Any]) -> dict[str, Any]:
        """Train one epoch without evaluation and return its weighted means."""
        means: dict[str, Any] = {}

        def score() -> float | None:
            means.update(self.engine.train_means())
            return means.get("loss")

        self.engine.run(loader, epochs=self.engine.epoch + 1, score_epoch=score)
        return means

    def train_step(self, batch: Any) -> None:
        """Run one optimizer step on one micro-batch, with its hooks; between two epochs it counts toward neither.

        Raises:
            NonFiniteError: the gradient is not finite.
        """
        engine = self.engine
        engine.model.train()
        engine.step_group([batch])
        if engine.cursor.position == 0:
            engine.progress.end_epoch()

    def evaluate(self, loader: Iterable[Any]) -> dict[str, Any]:
        """Return the weighted means over a loader, using averaged weights if the engine keeps an average.

        Raises:
            ConfigError: the loader is empty on every rank.
        """
        with self.scored_weights():
            values = self.engine.evaluate(loader)
        if is_user_class(_owner(type(self.engine), "evaluate")):
            return dict(results_of("evaluate", values))
        refuse_no_batch(self.engine.eval_cursor.position, "val_loader: it")
        return values

    def evaluate_each(self, loaders: Iterable[Any] | Mapping[str, Iterable[Any]]) -> dict[str, Any]:
        """Return the results over a loader, or over each loader of a dict, prefixed with its name."""
        return self._each(loaders, self.evaluate)

    def _each(
        self, loaders: Iterable[Any] | Mapping[str, Iterable[Any]], evaluate: Callable[[Iterable[Any]], dict[str, Any]]
    ) -> dict[str, Any]:
        if not isinstance(loaders, Mapping):
            return evaluate(loaders)
        results = {name: results_of("evaluate", evaluate(loader)) for name, loader in loaders.items()}
        return {f"{name}_{key}": value for name, values in results.items() for key, value in values.items()}

    def validate(self, loader: Iterable[Any] | Mapping[str, Iterable[Any]]) -> dict[str, Any]:
        """Return the results over a loader, or over each of a dict, like an epoch's validation."""
        return self.evaluate_each(loader)

    def test(self, loader: Iterable[Any] | Mapping[str, Iterable[Any]]) -> dict[str, Any]:
        """Return the results over the whole loader, or over each of a dict, without ``limit_eval_batches``."""
        with self.engine.evaluations_limited_to(None):
            return self.evaluate_each(loader)

    def predict(self, loader: Iterable[Any], forward: Callable[[Any], Any]) -> Any:
        """Return the concatenated outputs of ``forward(batch)`` over a loader, under the rules of an evaluation."""
        return predicted(self.engine, loader, forward)

    def _try_before_step_1(self, val_loader: Iterable[Any] | Mapping[str, Iterable[Any]]) -> None:
        """Evaluate ``num_sanity_eval_steps`` batches and log the results, or try one batch."""
        if not self.engine.settings.limits.num_sanity_eval_steps:
            named = val_loader if isinstance(val_loader, Mapping) else {"": val_loader}
            self._check_names({name: self._try_evaluation(loader) for name, loader in named.items()})
            return
        with self.engine.evaluations_limited_to(self.engine.settings.limits.sanity):
            results = numbers_of(self.evaluate_each(val_loader))
        self.engine.logger.info("evaluated before step 1: %s", results, extra={"topic": "sanity"})

    def _check_names(self, names: Mapping[str, list[str] | None]) -> None:
        """Raise if the metric to select by is missing from epoch records, as far as known before step 1.

        Raises:
            ConfigError: the metric is not among the results of the first batches.
        """
        if self.best is None or type(self) is not EpochTrainer or None in names.values():
            return
        each = [(loader, name) for loader, some in names.items() for name in ("loss", *(some or ()))]
        found = {f"{loader}_{name}" if loader else name for loader, name in each}
        known = ["epoch", "lr", "train_loss", *(f"{self.prefix}{name}" for name in sorted(found))]
        if self.best.metric not in known:
            raise ConfigError(
                f"epoch records will not contain it; they will contain {', '.join(known)}", argument="best.metric",
                value=self.best.metric,
            )  # fmt: skip

    def _try_evaluation(self, val_loader: Iterable[Any]) -> list[str] | None:
        """Return the names of results on one batch before step 1; only read it if a subclass evaluates itself."""
        owners = [_owner(type(self), "evaluate"), _owner(type(self.engine), "evaluate")]
        own = owners[0] is not EpochTrainer or is_user_class(owners[1])
        names = self._try_batch(val_loader, None if own else self.engine.task)
        if any(map(is_user_class, owners)) and not isinstance(val_loader, Iterator):
            first = FirstBatches(val_loader, 1, "limit_eval_batches")
            with self.engine.evaluations_limited_to(None):
                try_override(lambda: self.evaluate(first), self.engine.logger)
        return names

    def _try_batch(self, val_loader: Iterable[Any], task: Task | None) -> list[str] | None:
        with self.scored_weights():
            return try_evaluation(self.engine, val_loader, task)

    @contextlib.contextmanager
    def saving_if_evaluation_fails(self, save: Callable[[], None]) -> Iterator[None]:
        """Call ``save`` if an evaluation fails inside the block, so that the trained epoch is not lost."""
        self._scoring = False
        try:
            yield
        except Exception:
            if self._scoring:
                save()
            raise

    def scored_weights(self) -> AbstractContextManager[None]:
        """Use the weights that evaluations score inside the block."""
        return scored_weights(self.engine)

    def train_record(self, means: Mapping[str, Any]) -> dict[str, Any]:
        """Return the training part of an epoch's record: ``train_loss``; a front end may add to it."""
        return {"train_loss": means.get("loss", math.nan)}

    def _score(self, val_loader: Iterable[Any] | Mapping[str, Iterable[Any]] | None) -> float:
        """Evaluate a complete epoch, append its record, and return the value that plateau schedulers watch."""
        engine = self.engine
        train = engine.train_means()
        record: dict[str, Any] = {"epoch": engine.epoch + 1, **self.train_record(train)}
        if val_loader is not None:
            self._scoring = True  # stays True if the evaluation fails
            self.metrics = dict(results_of("evaluate", self.evaluate_each(val_loader)))
            self._scoring = False
            engine.state.record_scored("ema" if engine.averages or has_modes(engine.optimizer) else "model")
            record.update({f"{self.prefix}{name}": value for name, value in self.metrics.items()})
        record["lr"] = float(engine.last_lr[0]) if engine.last_lr else math.nan
        value = float(record[f"train_{self.loss_name}"])
        if self.best is not None:
            value = self.best.value_in(record)
            self.improved = self.best.update(record["epoch"], value)
            if math.isnan(value):
                engine.logger.warning(
                    "epoch %d: %s is NaN, so this epoch cannot be the best; check the data and the outputs for NaN",
                    record["epoch"], self.best.metric,
                )  # fmt: skip
        elif val_loader is not None:
            first = f"{next(iter(val_loader))}_" if isinstance(val_loader, Mapping) else ""
            value = float(record.get(f"{self.prefix}{first}{self.loss_name}", value))
        self.history.append(record)
        return value

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether the best rule has stopped this run."""
        return self.best is not None and self.best.should_stop

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint entries of the epoch driver."""
        return {
            "best_metric": None if self.best is None else self.best.best,
            "best_epoch": None if self.best is None else self.best.best_epoch,
            "selection": None if self.best is None else self.best.state_dict(),
            "metrics": self.metrics,
            "history": [dict(record) for record in self.history],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the entries from a checkpoint tree."""
        selection = state_dict.get("selection")
        if self.best is not None and selection is not None:
            self.best.load_state_dict(selection)
        elif self.best is not None:
            self.engine.logger.warning("the checkpoint has no best value: selection starts fresh")
        self.metrics = state_dict.get("metrics")
        self.history = [dict(record) for record in state_dict.get("history") or []]


def _owner(kind: type, method: str) -> type:
    """Return the class that defines a method of another class."""
    return next(owner for owner in kind.__mro__ if method in vars(owner))


def numbers_of(record: Mapping[str, Any]) -> str:
    """Format the numbers of an epoch's record for a log line.

    Example:
        >>> numbers_of({"epoch": 1, "train_loss": 0.5, "lr": 1e-3})
        'train_loss 0.5 lr 0.001'
    """
    return " ".join(f"{key} {value:.4g}" for key, value in record.items() if isinstance(value, float))
