"""Folder of a run: locked by one process, read on resume, written at the end of an epoch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from treadle import distributed
from treadle.checkpoint.files import write_text
from treadle.checkpoint.order import StateProgress, is_moved_aside
from treadle.checkpoint.ranks import on_all_ranks, on_rank_0
from treadle.checkpoint.retention import Retention
from treadle.checkpoint.store import copy_checkpoint, save_checkpoint
from treadle.engine import Engine
from treadle.engine.start_log import short_path
from treadle.exchange.pretrained import has_save_pretrained, write_pretrained
from treadle.faces.folder import CheckpointFolder
from treadle.functional.files import BEST, LAST, HistoryFile, checkpoints_in, epoch_file

_NUMBERED = r"checkpoint_epoch_(\d+)\.pt"
Save = Callable[[Path, int, float | None], None]


class NumberedFolder(CheckpointFolder):
    """Checkpoint folder of a trainer: naming, reading and writing.

    Args:
        engine: engine whose state they hold.
        save: the trainer's ``_save_checkpoint``, through which every checkpoint goes.
        history: hook that writes the history into the folder.
        retention: rule of which numbered checkpoints to keep.
        best_epochs: returns the epochs whose numbered checkpoints are kept too.
        other_names: returns parts of a tree under further names, without extra space in the file.

    Attributes:
        callbacks_interrupted: whether the run resumed from an epoch whose callbacks did not end.
    """

    loss_settings = ("loss",)

    def __init__(
        self,
        engine: Engine,
        save: Save,
        history: HistoryFile,
        *,
        retention: Retention | None = None,
        best_epochs: Callable[[Callable[[int], bool]], list[int]] = lambda has_file: [],
        other_names: Callable[[dict[str, Any]], dict[str, Any]] = lambda tree: {},
    ):
        super().__init__(engine, "save_dir")
        self._retention = retention or Retention()
        self._best_epochs = best_epochs
        self._history = history
        self._save = save
        self._save_freq = 0
        self._other_names = other_names
        self._written: list[Path] | None = None  # files at the end of the current epoch, while being written
        self._callbacks_due = False  # whether the state being written precedes the epoch's callbacks
        self.callbacks_interrupted = False

    def use(self, path: str | Path | None, save_freq: int | None = None) -> None:
        """Set the folder of a call, and the epochs between numbered checkpoints; 0 or None for none."""
        super().use(path)
        self._history.use(self.path)
        self._save_freq = save_freq or 0

    def held(self) -> AbstractContextManager[None]:
        """Lock the folder for this run inside the block; a replayed run writes no history either."""
        held = super().held()
        self._history.use(self.path)
        return held

    # -- reading --------------------------------------------------------------------------------------------------

    def candidates(self, folder: Path) -> Iterable[Path]:
        """Return every checkpoint in the folder."""
        return checkpoints_in(folder)

    def resume(self, source: str | Path | None) -> Path | None:
        """Load ``resume_from`` into a run that has not started, and finish what a kill interrupted."""
        found = super().resume(source)
        if found is not None:
            self._complete(found)
        return found

    def restore(self, tree: Mapping[str, Any], source: str | Path) -> None:
        """Restore a checkpoint tree in place, and find out whether the callbacks of its epoch were interrupted."""
        super().restore(tree, source)
        if tree.get("callbacks_due") and self.path is not None:
            running = _running(self.engine.epoch)
            self.callbacks_interrupted = on_rank_0(
                lambda: self._marker.is_file() and self._marker.read_text() == running
            )
        if self.callbacks_interrupted:
            self.record_written()

    def _complete(self, source: Path) -> None:
        """Write the epoch's numbered file, if the run was killed between writing the best and it."""
        assert self.path is not None
        own = epoch_file(self.path, self.engine.epoch)
        if source.name == BEST and self._is_due():
            on_rank_0(lambda: None if own.exists() else copy_checkpoint(source, own))

    # -- writing --------------------------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        return bool(self._save_freq) and self.engine.epoch % self._save_freq == 0

    def write_epoch(
        self,
        *,
        improved: bool | None,
        best: float | None,
        scored_weights: Callable[[], AbstractContextManager[None]],
        callbacks: bool = False,
    ) -> None:
        """Write the files of an epoch.

        A model with ``save_pretrained`` writes ``pretrained/`` with each best checkpoint or, if no epoch is selected,
        with each numbered one. The best checkpoint is written first: whenever the run is killed, the newest file
        records the best.

        Args:
            improved: whether this is the best epoch so far; None without selection.
            best: the best value so far.
            scored_weights: context manager that uses the weights that evaluations score.
            callbacks: whether callbacks are called next, until :meth:`end_callbacks`.
        """
        if self.path is None:
            return
        self.before_write()
        self._history.write()
        epoch, self._written, self._callbacks_due = self.engine.epoch, [], callbacks
        try:
            if callbacks and (improved or self._is_due()):  # before the state that the marker refers to
                on_rank_0(lambda: write_text(_running(epoch), self._marker))
            if improved or (improved is None and self._is_due()):
                self._write_pretrained(self.path / "pretrained", scored_weights)
            if improved:
                self._save(self.path / BEST, epoch, best)
            if self._is_due():
                self._save(epoch_file(self.path, epoch), epoch, best)
            if improved or self._is_due():
                self.record_written()
        finally:
            self._written, self._callbacks_due = None, False
        on_rank_0(self._prune)

    @property
    def _marker(self) -> Path:
        """File that exists while the callbacks of an epoch run whose state is written."""
        assert self.path is not None
        return self.path / ".treadle-callbacks"

    def end_callbacks(self) -> None:
        """Record that the callbacks of the epoch have been called."""
        self.callbacks_interrupted = False
        if self.path is not None:
            on_rank_0(lambda: self._marker.unlink(missing_ok=True))

    def write_changed(self, best: float | None) -> None:
        """Rewrite the state of an epoch after callbacks have changed it.

        The best file is kept as evaluated; if the epoch has no other file, the state goes into the last one.
        """
        now = StateProgress(self.engine.step, self.engine.epoch)
        if self.path is not None and self._on_disk == now:
            self.before_write()
            path = epoch_file(self.path, self.engine.epoch) if self._is_due() else self.path / LAST
            self._save(path, self.engine.epoch, best)
            self.record_written()

    def _prune(self) -> None:
        """Delete numbered checkpoints that no rule keeps."""
        folder = self.path
        if folder is None or self._retention.keep_previous is None:
            return
        kept = [self.engine.epoch, *self._best_epochs(lambda epoch: epoch_file(folder, epoch).is_file())]
        protected = [*(epoch_file(folder, number) for number in kept), *self.named_source()]
        self._retention.prune(folder, _NUMBERED, protected, newest=self.engine.epoch)

    def write_last(self) -> None:
        """Write the current state under the number of its epoch or, within an epoch, as the last one."""
        assert self.path is not None
        self.before_write()
        epoch = self.engine.epoch
        numbered = self._save_freq and self.engine.cursor.position == 0
        self._save(epoch_file(self.path, epoch) if numbered else self.path / LAST, epoch, None)
        on_rank_0(self._prune)

    def save_and_log(self) -> None:
        """Write the state when a signal ends the run, and log how to resume; collective."""
        self._history.write()
        self.write_end()
        if self.engine.state.saved is not None and distributed.rank() == 0:
            text = "saved %s at step %d, epoch %d; run again with resume_from='auto' to continue from there"
            path = short_path(self.engine.state.saved)
            self.engine.logger.info(text, path, self.engine.step, self.engine.epoch)

    def save_after_failed_evaluation(self) -> None:
        """Write the trained epoch, as on a signal; in a single process only."""
        if self.path is not None and distributed.world_size() == 1:
            self.save_and_log()

    def _write_pretrained(self, path: Path, scored_weights: Callable[[], AbstractContextManager[None]]) -> None:
        model = self.engine.model
        if has_save_pretrained(model):
            with scored_weights() if self.engine.state.scored == "ema" else contextlib.nullcontext():
                on_all_ranks(lambda: write_pretrained(model, path))

    def write(self, path: Path, metric_value: float | None) -> None:
        """Write one full checkpoint; the second one of an epoch is a copy of the first. Collective."""
        first = self._written[0] if self._written else None
        if first is not None and not is_moved_aside(first):
            on_rank_0(lambda: copy_checkpoint(first, path) if first.exists() else None)
            on_rank_0(lambda: self._name(path))
            return
        tree = self.engine.state_dict()
        if metric_value is not None:
            tree["best_metric"] = float(metric_value)
        if self._callbacks_due:
            tree["callbacks_due"] = True
        tree |= self._other_names(tree)
        written = on_rank_0(lambda: save_checkpoint(tree, path))
        self.engine.state.record_saved(written, self.engine.step)
        on_rank_0(lambda: self._name(written))
        if self._written is not None:
            self._written.append(written)

    def _name(self, path: Path) -> None:
        """Point the name used by every front end to a state of the run."""
        if path.exists() and path in checkpoints_in(path.parent):
            if path.name == BEST:
                self.name_state(path, best=True)
            self.name_state(path, best=False)


def _running(epoch: int) -> str:
    return f"the callbacks of epoch {epoch} are running\n"
