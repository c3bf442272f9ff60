"""Records of an epoch of the graph face: the record itself, the history, the arguments of log hooks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from treadle import distributed
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
from treadle.means import read_scalars

LogHook = Callable[[dict[str, float], int, str], object]
TRAIN, VAL = "train_", "val_"


class GraphRule(BestRule):
    """A best rule over one key of a training or validation record."""

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
    """Return the error of a best metric that the records do not have."""
    which = "validation" if prefix == VAL else "training"
    return ConfigError(
        f"the {which} record has no such key; it has {', '.join(known)}", argument="metric_for_best", value=key
    )


class GraphEpochs(SelectingEpochs):
    """An epoch driver whose records hold the metrics of training outputs, and the seconds an epoch took.

    Args:
        engine: runs the steps.
        task: turns batches into losses.
        outputs: keeps the outputs of the training steps.
    """

    def __init__(self, engine: Engine, task: GraphTask, outputs: TrainOutputsHook):
        super().__init__(engine, prefix=VAL)
        self._task = task
        self._outputs = outputs
        self._opened = time.perf_counter()

    def fit(self, train_loader: Iterable[Any], *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """Train as the epoch driver does."""
        self._task.padding.plan(train_loader)
        self._opened = time.perf_counter()
        return super().fit(train_loader, *args, **kwargs)

    def train_epoch(self, loader: Iterable[Any]) -> dict[str, Any]:
        """Train one more epoch without evaluation and selection; return its record."""
        self.prepare_alone()
        self._task.padding.plan(loader)
        self._opened = time.perf_counter()
        record: dict[str, Any] = {}

        def score() -> float:
            record.update(self.train_record(self.engine.train_means()), lr=self._lr())
            return float(record["train_loss"])

        self.engine.run(loader, epochs=self.engine.epoch + 1, score_epoch=score)
        return train_part(record)

    def train_record(self, means: Mapping[str, Any]) -> dict[str, Any]:
        """Return loss, metrics of training outputs, the share of padding if any, and the seconds of the epoch."""
        metrics = self._outputs.measure()
        shares = share_of_padding(self._task.padding.used())
        padding = {f"{TRAIN}padding": shares["nodes"]} if shares else {}
        return {
            **super().train_record(means),
            **{f"{TRAIN}{name}": value for name, value in metrics.items()},
            **padding,
            "time": time.perf_counter() - self._opened,
        }

    def _lr(self) -> float:
        return float(read_scalars(self.engine.last_lr[:1])[0])

    def _score(self, val_loader: EvalLoaders | None) -> float:
        value = super()._score(val_loader)
        self._opened = time.perf_counter()
        return value

    def evaluate(self, loader: Iterable[Any], *, mask: str = "val_mask") -> dict[str, Any]:
        """Return the weighted mean loss and the metrics over a loader, each graph counted once.

        Args:
            loader: batches.
            mask: which rows count of batches that have masks of the field.

        Raises:
            ConfigError: the loader is empty, or its batches have other masks than this.
        """
        with self._task.counting_once(loader, mask=mask):
            return super().evaluate(loader)

    def evaluate_each(
        self, loaders: Iterable[Any] | Mapping[str, Iterable[Any]], *, mask: str = "val_mask"
    ) -> dict[str, Any]:
        """Return the results over a loader, or over each of a dict, by the rows of a mask where there are masks."""
        return self._each(loaders, lambda loader: self.evaluate(loader, mask=mask))


def keys_of(record: Mapping[str, Any], prefix: str) -> list[str]:
    """Return the keys that the training or validation part of an epoch's record can be selected by.

    Example:
        >>> keys_of({"epoch": 1, "train_loss": 1.0, "val_loss": 2.0, "val_mae": 1.0}, "val_")
        ['loss', 'mae']
    """
    return [key.removeprefix(prefix) for key in record if key.startswith(prefix)]


def train_part(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training part of an epoch's record: ``epoch``, ``loss``, metrics, ``lr``, ``time``.

    Example:
        >>> train_part({"epoch": 1, "train_loss": 1.0, "time": 0.5, "val_loss": 2.0, "lr": 0.1})
        {'epoch': 1, 'loss': 1.0, 'lr': 0.1, 'time': 0.5}
    """
    last = {key: record[key] for key in ("lr", "time") if key in record}
    return {**_part(record, TRAIN), **last}


def val_part(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validation part of an epoch's record, empty where there was no validation.

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
    """Return the numbers of a record as a line for the log.

    Example:
        >>> described({"epoch": 1, "loss": 0.51234, "mae": 0.6})
        'loss 0.5123 mae 0.6'
    """
    return " ".join(f"{key} {value:.4g}" for key, value in record.items() if key != "epoch")


class GraphHistoryFile(HistoryHook):
    """File ``history.json``: ``{"train": [...], "val": [...]}``, one record a line."""

    def _write(self) -> None:
        if distributed.rank() == 0:
            self._write_text(dump_history(self.history()))


def dump_history(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the history as JSON, NaN and infinities as null.

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
    """Users' functions ``hook(metrics, step, prefix)``, called every ``log_every`` steps and with epoch records.

    On several ranks only the first one calls them.

    Args:
        log_every: steps between step means; None or 0: none.

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
        """Collect the step and report when it is time."""
        if not self._reports:
            return
        self._collect(trainer)
        if trainer.step % self.interval == 0:
            self._report(trainer)

    def on_after_train(self, trainer: Engine) -> None:
        """Keep the rest for the next report: a run may be continued."""

    def report(self, trainer: Engine, means: dict[str, Any]) -> None:
        """Tell the hooks ``loss``, ``lr`` and ``grad_norm``."""
        shown = {key: value for key, value in means.items() if key in ("loss", "grad_norm")}
        self.tell({**shown, "lr": means["lr"][0]}, trainer.step, "step")

    def tell(self, metrics: Mapping[str, Any], step: int, prefix: str) -> None:
        """Call every hook with the numbers of a report, on the first rank."""
        if distributed.rank() != 0:
            return
        for hook in self.hooks:
            hook({key: float(value) for key, value in metrics.items() if key != "epoch"}, step, prefix)
