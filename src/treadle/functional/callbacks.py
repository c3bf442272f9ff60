"""Callbacks that the user passes to ``train``, called after each epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treadle.checkpoint.comparison import same
from treadle.engine import Engine
from treadle.engine.movable_state import movable_state
from treadle.functional.files import in_order
from treadle.functional.folder import NumberedFolder

if TYPE_CHECKING:
    from treadle.functional.trainer import Trainer

_log = logging.getLogger("treadle.functional")
Callback = Callable[[Any, int, dict[str, Any]], object]


class Callbacks:
    """Callbacks of one call of ``train``.

    Args:
        trainer: passed to each callback.
        engine: its engine, whose state the callbacks may change.
        folder: writes the state again if they do.
        callbacks: called as ``callback(trainer, epoch, metrics)``.
        first_epoch: number of the first epoch.
    """

    def __init__(
        self,
        trainer: Trainer,
        engine: Engine,
        folder: NumberedFolder,
        *,
        callbacks: Sequence[Callback],
        first_epoch: int = 0,
    ):
        self._trainer = trainer
        self._engine = engine
        self._folder = folder
        self._callbacks = callbacks
        self._first_epoch = first_epoch

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def call(self, record: Mapping[str, Any]) -> None:
        """Call the callbacks with the record of a complete epoch, and save what they change."""
        before = movable_state(self._engine)
        for callback in self._callbacks:
            callback(self._trainer, self._engine.epoch - 1 + self._first_epoch, in_order(record))
        if not same(before, movable_state(self._engine)):
            self._folder.write_changed(self._trainer.best_metric)
        self._folder.end_callbacks()

    def call_again(self, loader: Iterable[Any]) -> bool:
        """Call the callbacks in which the process was killed; return whether one of them stops the run."""
        _log.info("epoch %d: its callbacks, which were interrupted, are called again", self._engine.epoch)
        self._engine.cursor.settle(loader)
        self.call(self._trainer._epochs.history[-1])
        return self._trainer.should_stop
