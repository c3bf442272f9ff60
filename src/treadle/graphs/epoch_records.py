"""Epoch records of the graph trainer, its history, and log hooks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from treadle import distributed
from treadle.device.host_transfer import read_scalars
from treadle.engine import Engine
from treadle.engine.best import BestRule
from treadle.errors import ConfigError
from treadle.faces.loaders import EvalLoaders
from treadle.faces.selection import SelectingEpochs
from treadle.graphs.padding import share_of_padding
from treadle.graphs.task import GraphTask
from treadle.graphs.train_outputs import TrainOutputsHook
from treadle.hooks.files import to_json
from treadle.hooks.history import HistoryHook
from treadle.hooks.reporting import IntervalHook

LogHook = Callable[[dict[str, float], int, str], object]
TRAIN, VAL = "train_", "val_"


class GraphRule(BestRule):
    """Best-checkpoint rule over one key of a training or validation record."""

    def value_in(self, record: Mapping[str, Any]) -> float:
        """Return the metric's value in an epoch record.

        Raises:
            ConfigError: the record has no such key; the keys present are listed.
        """
        if self.metric not in record:
            prefix = VAL if self.metric.startswith(VAL) else TRAIN
            raise missing_key(self.metric.removeprefix(prefix), keys_of(record, prefix), prefix)
        return super().value_in(record)


def missing_key(key: str, known: Iterable[str], prefix: str) -> ConfigError:
    """Return the error for a best metric that is missing from the records."""
    which = "validation" if prefix == VAL else "training"
    return ConfigError(
        f"the {which} record has no such key; it has {', '.join(known)}", argument="metric_for_best", value=key
    )


class GraphEpochs(SelectingEpochs):
    """Epoch driver whose records contain the metrics of training outputs and the duration of an epoch.

    Args:
        engine: runs the steps.
        task: turns batches into losses.
        outputs: collects the outputs of the training steps.
    """

    def __init__(self, engine: Engine, task: GraphTask, outputs: TrainOutputsHook):
        super().__init__(engine, prefix=VAL)
        self._task = task
        self._outputs = outputs
        self._opened = time.perf_counter()

    def fit(self, train_loader: Iterable[Any], *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """Train like the base epoch driver."""
        self._task.padding.plan(train_loader)
        self._opened = time.perf_counter()
        return super().fit(train_loader, *args, **kwargs)

    def train_epoch(self, loader: Iterable[Any]) -> dict[str, Any]:
        """Train one epoch without evaluation or selection; return its record."""
        self.prepare_alone()
        self._task.padding.plan(loader)
        self._opened = time.perf_counter()
        record: dict[str, Any] = {}

        def score() -> float:
            record.update(
                self.train_record(self.engine.train_means()), lr=float(read_scalars(self.engine.last_lr[:1])[0])
            )
            return float(record["train_loss"])

        self.engine.run(loader, epochs=self.engine.epoch + 1, score_epoch=score)
        return train_part(record)

    def train_record(self, means: Mapping[str, Any]) -> dict[str, Any]:
        """Return the loss, the metrics of training outputs, the fraction of padding if any, and the epoch's seconds."""
        metrics = self._outputs.measure()
        shares = share_of_padding(self._task.padding.used())
        padding = {f"{TRAIN}padding": shares["nodes"]} if shares else {}
        return {
            **super().train_record(means),
            **{f"{TRAIN}{name}": value for name, value in metrics.items()},
            **padding,
            "time": time.perf_counter() - self._opened,
        }

    def _score(self, val_loader: EvalLoaders | None) -> float:
        value = super()._score(val_loader)
        self._opened = time.perf_counter()
        return value

    def _try_evaluation(self, val_loader: Iterable[Any]) -> list[str] | None:
        """Evaluate one batch before step 1, where the loader counts every graph once anyway."""
        with self._task.counting_once(val_loader):
            return self._try_batch(val_loader, self._task)

    def evaluate(self, loader: Iterable[Any], *, mask: str = "val_mask") -> dict[str, Any]:
        """Return the weighted mean loss and the metrics over a loader, each graph counted once.

        Args:
            loader: batches.
            mask: mask that selects the rows that count, for batches with split masks.

        Raises:
            ConfigError: the loader is empty, or its batches have masks other than this one.
        """
        with self._task.counting_once(loader, mask=mask):
            return super().evaluate(loader)

    def evaluate_each(
        self, loaders: Iterable[Any] | Mapping[str, Iterable[Any]], *, mask: str = "val_mask"
    ) -> dict[str, Any]:
        """Evaluate on a loader, or on each loader of a dict, counting the rows of a mask if there are masks."""
        return self._each(loaders, lambda loader: self.evaluate(loader, mask=mask))


def keys_of(record: Mapping[str, Any], prefix: str) -> list[str]:
    """Return the keys of the training or validation part of an epoch record that can be used for selection.

    Example:
        >>> keys_of({"epoch": 1, "train_loss": 1.0, "val_loss": 2.0, "val_mae": 1.0}, "val_")
        ['loss', 'mae']
    """
    return [key.removeprefix(prefix) for key in record if key.startswith(prefix)]


def train_part(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training part of an epoch record: ``epoch``, ``loss``, metrics, ``lr``, ``time``.

    Example:
        >>> train_part({"epoch": 1, "train_loss": 1.0, "time": 0.5, "val_loss": 2.0, "lr": 0.1})
        {'epoch': 1, 'loss': 1.0, 'lr': 0.1, 'time': 0.5}
    """
    last = {key: record[key] for key in ("lr", "time") if key in record}
    return {**_part(record, TRAIN), **last}


def val_part(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validation part of an epoch record; empty without validation.

    Example:
        >>> val_part({"epoch": 1, "train_loss": 1.0, "val_loss": 2.0})
        {'epoch': 1, 'loss': 2.0}
    """
    return _part(record, VAL) if keys_of(record, VAL) else {}


def _part(record: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    epoch = {"epoch": record["epoch"]} if "epoch" in record else {}
    return {**epoch, **{key: record[f"{prefix}{key}"] for key in keys_of(record, prefix)}}


def as_history(records: Iterable[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return records as ``{"train": [...], "val": [...]}``."""
    kept = list(records)
    return {
        "train": [train_part(record) for record in kept],
        "val": [part for record in kept if (part := val_part(record))],
    }


def described(record: Mapping[str, Any]) -> str:
    """Format the numbers of a record as a log line.

    Example:
        >>> described({"epoch": 1, "loss": 0.51234, "mae": 0.6})
        'loss 0.5123 mae 0.6'
    """
    return " ".join(f"{key} {value:.4g}" for key, value in record.items() if key != "epoch")


class GraphHistoryFile(HistoryHook):
    """File ``history.json``: ``{"train": [...], "val": [...]}``, one record per line."""

    def _write(self) -> None:
        if distributed.rank() == 0:
            self._write_text(dump_history(self.history()))


def dump_history(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the history as JSON, with NaN and infinities as null.

    Example:
        >>> dump_history([{"epoch": 1, "train_loss": float("nan")}])
        '{"train": [\\n{"epoch": 1, "loss": null}\\n],\\n"val": []}\\n'
    """
    parts = []
    for name, part in as_history(records).items():
        lines = [json.dumps(to_json(record), allow_nan=False) for record in part]
        text = "[\n" + ",\n".join(lines) + "\n]" if lines else "[]"
        parts.append(f"{json.dumps(name)}: {text}")
    return "{" + ",\n".join(parts) + "}\n"


class LogHooks(IntervalHook):
    """Hook that calls user functions ``hook(metrics, step, prefix)`` every ``log_every`` steps and with epoch records.

    In distributed runs only rank 0 calls them.

    Args:
        log_every: steps between step reports; None or 0 disables them.

    Attributes:
        hooks: the functions.

    Example:
        >>> LogHooks(None).hooks
        []
    """

    def __init__(self, log_every: int | None):
        super().__init__(log_every or 1, sync=True)
        self._reports = bool(log_every)
        self.hooks: list[LogHook] = []

    def on_after_step(self, trainer: Engine) -> None:
        """Collect the step and report if due."""
        if not self._reports:
            return
        self._collect(trainer)
        if trainer.step % self.interval == 0:
            self._report(trainer)

    def on_after_train(self, trainer: Engine) -> None:
        """Keep the remainder for the next report, since a run may be continued."""

    def report(self, trainer: Engine, means: dict[str, Any]) -> None:
        """Report ``loss``, ``lr`` and ``grad_norm`` to the hooks."""
        shown = {key: value for key, value in means.items() if key in ("loss", "grad_norm")}
        self.tell({**shown, "lr": means["lr"][0]}, trainer.step, "step")

    def tell(self, metrics: Mapping[str, Any], step: int, prefix: str) -> None:
        """Call every hook with the numbers of a report, on rank 0."""
        if distributed.rank() != 0:
            return
        for hook in self.hooks:
            hook({key: float(value) for key, value in metrics.items() if key != "epoch"}, step, prefix)
