"""The epoch driver: train, evaluate, best rule, history. It runs on the engine and adds no loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from treadle.checkpoint.introspection import is_users_class
from treadle.data.amount import FirstBatches
from treadle.engine import Engine
from treadle.engine.best import BestRule
from treadle.engine.evaluation import refuse_no_batch, results_of, try_override
from treadle.engine.limits import Deadline
from treadle.engine.predictions import predicted, scored_weights
from treadle.engine.rehearsal import try_evaluation
from treadle.errors import ConfigError
from treadle.errors.arguments import checked
from treadle.faces.loaders import refuse_used_up
from treadle.optim.evaluation_point import has_modes
from treadle.optim.schedules import check_plateau
from treadle.task import Task


class EpochTrainer:
    """Trainer to an absolute number of epochs that keeps one record per epoch.

    Args:
        engine: runs the steps.
        best: selects the best epoch and stops early; None does neither.
        prefix: goes before the names of evaluation results in a record.

    Attributes:
        history: list of records; each has ``epoch`` (1-based), ``train_loss``, the evaluation results and ``lr``.
        metrics: the last evaluation's results, without the prefix; None before.
        improved: whether the last epoch was an improvement.
        loss_name: what records call the loss, after ``train_`` or the prefix; a face may choose another name.

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
        self.scoring = False  # whether an evaluation runs, or has failed
        self.deadline: Deadline | None = None  # of a call that runs the engine several times
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
            val_loader: micro-batches for evaluation, or None; of a dict each loader is evaluated under its name.
            epochs: absolute target.
            after_epoch: called with the epoch's record after ``on_after_epoch``: checkpoints and user callbacks.

        Returns:
            The history.

        Raises:
            ConfigError: a plateau scheduler goes by the other direction than the best rule's metric, or the loss.
        """
        metric, mode = ("the loss", "min") if self.best is None else (self.best.metric, self.best.mode)
        check_plateau(self.engine.lr_scheduler, metric, mode)
        refuse_used_up(val_loader, "val_loader", times=epochs - self.engine.epoch)
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
        """Run one optimizer step on one micro-batch, with its hooks; between two epochs it belongs to neither.

        Raises:
            NonFiniteError: the gradient is not finite.
        """
        engine = self.engine
        engine.model.train()
        engine.step_group([batch])
        if engine.cursor.position == 0:
            engine.progress.end_epoch()

    def evaluate(self, loader: Iterable[Any]) -> dict[str, Any]:
        """Return the weighted means over a loader: of the averaged weights if the engine keeps an average.

        Raises:
            ConfigError: the loader is empty, on every rank.
        """
        with self.scored_weights():
            values = self.engine.evaluate(loader)
        if is_users_class(_owner(type(self.engine), "evaluate")):
            return dict(results_of("evaluate", values))
        refuse_no_batch(self.engine.eval_cursor.position, "val_loader: it")
        return values

    def evaluate_each(self, loaders: Iterable[Any] | Mapping[str, Iterable[Any]]) -> dict[str, Any]:
        """Return the results over a loader, or over each of a dict with the names before those of the results."""
        return self._each(loaders, self.evaluate)

    def _each(
        self, loaders: Iterable[Any] | Mapping[str, Iterable[Any]], evaluate: Callable[[Iterable[Any]], dict[str, Any]]
    ) -> dict[str, Any]:
        if not isinstance(loaders, Mapping):
            return evaluate(loaders)
        results = {name: results_of("evaluate", evaluate(loader)) for name, loader in loaders.items()}
        return {f"{name}_{key}": value for name, values in results.items() for key, value in values.items()}

    def validate(self, loader: Iterable[Any] | Mapping[str, Iterable[Any]]) -> dict[str, Any]:
        """Return the results over a loader, or each of a dict, as an epoch's validation has them."""
        return self.evaluate_each(loader)

    def test(self, loader: Iterable[Any] | Mapping[str, Iterable[Any]]) -> dict[str, Any]:
        """Return the results over the whole loader, or each of a dict, without ``limit_eval_batches``."""
        with self.engine.evaluations_limited_to(None):
            return self.evaluate_each(loader)

    def predict(self, loader: Iterable[Any], forward: Callable[[Any], Any]) -> Any:
        """Return the joined outputs of ``forward(batch)`` over a loader, by the rules of an evaluation."""
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
        """Raise for a metric to select by that no epoch's record will have, as far as that is known before step 1.

        Raises:
            ConfigError: it is not among the results of the first batches.
        """
        if self.best is None or type(self) is not EpochTrainer or None in names.values():
            return
        each = [(loader, name) for loader, some in names.items() for name in ("loss", *(some or ()))]
        found = {f"{loader}_{name}" if loader else name for loader, name in each}
        known = ["epoch", "lr", "train_loss", *(f"{self.prefix}{name}" for name in sorted(found))]
        if self.best.metric not in known:
            raise ConfigError(
                f"no epoch's record will have it; it will have {', '.join(known)}", argument="best.metric",
                value=self.best.metric,
            )  # fmt: skip

    def _try_evaluation(self, val_loader: Iterable[Any]) -> list[str] | None:
        """Return the names of results, of one batch before step 1; only read it where a subclass evaluates itself."""
        owners = [_owner(type(self), "evaluate"), _owner(type(self.engine), "evaluate")]
        own = owners[0] is not EpochTrainer or is_users_class(owners[1])
        names = self._try_batch(val_loader, None if own else self.engine.task)
        if any(map(is_users_class, owners)) and not isinstance(val_loader, Iterator):
            first = FirstBatches(val_loader, 1, "limit_eval_batches")
            with self.engine.evaluations_limited_to(None):
                try_override(lambda: self.evaluate(first), self.engine.logger)
        return names

    def _try_batch(self, val_loader: Iterable[Any], task: Task | None) -> list[str] | None:
        with self.scored_weights():
            return try_evaluation(self.engine, val_loader, task)

    def scored_weights(self) -> AbstractContextManager[None]:
        """Put the weights that evaluations score into the model inside the block."""
        return scored_weights(self.engine)

    def train_record(self, means: Mapping[str, Any]) -> dict[str, Any]:
        """Return the training part of an epoch's record: ``train_loss``; a face may add to it."""
        return {"train_loss": means.get("loss", math.nan)}

    def _score(self, val_loader: Iterable[Any] | Mapping[str, Iterable[Any]] | None) -> float:
        """Evaluate a complete epoch, append its record, and return the value that plateau schedulers watch."""
        engine = self.engine
        train = engine.train_means()
        record: dict[str, Any] = {"epoch": engine.epoch + 1, **self.train_record(train)}
        if val_loader is not None:
            self.scoring = True  # and so it stays if the evaluation fails
            self.metrics = dict(results_of("evaluate", self.evaluate_each(val_loader)))
            self.scoring = False
            engine.state.record_scored("ema" if engine.averages or has_modes(engine.optimizer) else "model")
            record.update({f"{self.prefix}{name}": value for name, value in self.metrics.items()})
        record["lr"] = _as_float(engine.last_lr[0]) if engine.last_lr else math.nan
        value = float(record[f"train_{self.loss_name}"])
        if self.best is not None:
            value = self.best.value_in(record)
            self.improved = self.best.update(record["epoch"], value)
            if math.isnan(value):
                engine.logger.warning(
                    "epoch %d: %s is NaN, so it cannot be the best; look for NaN in the data or the outputs",
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
        """Restore them from a checkpoint tree."""
        selection = state_dict.get("selection")
        if self.best is not None and selection is not None:
            self.best.load_state_dict(selection)
        elif self.best is not None:
            self.engine.logger.warning("the checkpoint has no state of the best rule: selection starts fresh")
        self.metrics = state_dict.get("metrics")
        self.history = [dict(record) for record in state_dict.get("history") or []]


def _owner(kind: type, method: str) -> type:
    """Return the class that a method of another comes from."""
    return next(owner for owner in kind.__mro__ if method in vars(owner))


def _as_float(value: float | Tensor) -> float:
    return float(value)


def numbers_of(record: Mapping[str, Any]) -> str:
    """Return the numbers of an epoch's record for a line of a log.

    Example:
        >>> numbers_of({"epoch": 1, "train_loss": 0.5, "lr": 1e-3})
        'train_loss 0.5 lr 0.001'
    """
    return " ".join(f"{key} {value:.4g}" for key, value in record.items() if isinstance(value, float))
