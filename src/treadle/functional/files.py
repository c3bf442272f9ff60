"""Files of a run, and the format of its history."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle import distributed
from treadle.faces.epochs import numbers_of
from treadle.hooks.files import to_json
from treadle.hooks.history import HistoryHook

if TYPE_CHECKING:
    from treadle.engine import Engine

_log = logging.getLogger("treadle.functional")
BEST, LAST = "best_model.pt", "last.pt"
_FIRST = ("epoch", "train_loss", "lr")


def epoch_file(folder: Path, epoch: int) -> Path:
    """Return the name of an epoch's checkpoint, by epochs completed."""
    return folder / f"checkpoint_epoch_{epoch}.pt"


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a run folder, including non-finite ones; the best comes last."""
    pattern = re.compile(r"(checkpoint_epoch_\d+|last|best_model)(\.nonfinite)?\.pt")
    found = [path for path in sorted(folder.glob("*.pt")) if pattern.fullmatch(path.name)]
    return sorted(found, key=lambda path: path.name.startswith("best_model"))


def in_order(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return an epoch's record with ``epoch``, ``train_loss`` and ``lr`` before the evaluation results.

    Example:
        >>> in_order({"epoch": 1, "train_loss": 0.5, "eval_loss": 0.6, "lr": 0.1})
        {'epoch': 1, 'train_loss': 0.5, 'lr': 0.1, 'eval_loss': 0.6}
    """
    first = {key: record[key] for key in _FIRST if key in record}
    evaluated = {key: value for key, value in record.items() if key.startswith("eval_")}
    return {**first, **evaluated, **record}


def as_columns(records: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return records as equally long lists by key, with None for missing keys.

    Example:
        >>> as_columns([{"epoch": 1, "train_loss": 0.5}, {"epoch": 2, "train_loss": 0.4, "eval_loss": 0.6}])
        {'epoch': [1, 2], 'train_loss': [0.5, 0.4], 'eval_loss': [None, 0.6]}
    """
    ordered = [in_order(record) for record in records]
    keys = dict.fromkeys(key for record in ordered for key in record)
    return {key: [record.get(key) for record in ordered] for key in keys}


def log_epoch(epoch: int, record: Mapping[str, Any]) -> None:
    """Log the numbers of an epoch in one line, on rank 0; ``epoch`` counts from 0, as in callbacks."""
    if distributed.rank() == 0:
        _log.info("Epoch %d: %s", epoch + 1, numbers_of(in_order(record)), extra={"topic": "epoch"})


class HistoryFile(HistoryHook):
    """Hook that writes ``history.json``, the history as a dict of lists, if the trainer has a folder.

    Args:
        history: returns the records.

    Attributes:
        folder: run folder; None writes nothing.
    """

    def __init__(self, history: Callable[[], Sequence[Mapping[str, Any]]]):
        super().__init__("history.json", history)
        self.folder: Path | None = None

    def use(self, folder: Path | None) -> None:
        """Set the run folder; None writes nothing."""
        self.folder = folder

    def on_before_train(self, trainer: Engine) -> None:
        """Rename the file of another run if this run starts fresh."""
        if self.folder is not None:
            self.path = self.folder / "history.json"
            super().on_before_train(trainer)

    def on_after_epoch(self, trainer: Engine) -> None:
        """Leave writing to the trainer, which writes once the record is complete."""

    def write(self) -> None:
        """Write the file."""
        self._write()

    def _write(self) -> None:
        if self.folder is not None and distributed.rank() == 0:
            self._write_text(dump_columns(self.history()))


def dump_columns(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the history as JSON, one column per line, NaN and infinities as null."""
    columns = to_json(as_columns(records))
    lines = [f"{json.dumps(key)}: {json.dumps(values, allow_nan=False)}" for key, values in columns.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n" if lines else "{}\n"
