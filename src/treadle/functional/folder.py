"""The folder of a run: held by one process, read when a run resumes, written at the end of an epoch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from treadle import distributed
from treadle.checkpoint.lock import run_lock
from treadle.checkpoint.store import find_latest, link_checkpoint, load_checkpoint, save_checkpoint
from treadle.engine import Engine
from treadle.errors import CheckpointError, ConfigError
from treadle.functional.files import BEST, HistoryFile, checkpoints_in, epoch_file
from treadle.pretrained import has_save_pretrained, write_pretrained

_log = logging.getLogger("treadle.functional")
Save = Callable[[Path, int, float | None], None]


class RunFolder:
    """Names, reads and writes the checkpoints of a trainer.

    Args:
        engine: whose state they hold.
        save: the trainer's ``_save_checkpoint``, through which every checkpoint goes.
        history: writes the history into the folder.

    Attributes:
        path: the folder; None writes nothing.

    Example:
        >>> # folder = RunFolder(engine, trainer._save_checkpoint, HistoryFile(lambda: []))
    """

    def __init__(self, engine: Engine, save: Save, history: HistoryFile):
        self.engine = engine
        self._history = history
        self.path: Path | None = None
        self._save = save
        self._save_freq = 0
        self._written: list[Path] | None = None  # at the end of the present epoch, while it is written

    def use(self, path: str | Path | None, save_freq: int | None) -> None:
        """Names the folder of a call, and how many epochs lie between two numbered checkpoints; 0 or None: none."""
        self.path = self._history.folder = None if path is None else Path(path)
        self.engine.workspace = None if self.path is None else self.path.absolute()
        self._save_freq = save_freq or 0

    def held(self) -> AbstractContextManager[None]:
        """Holds the folder for this process inside the block."""
        if self.path is None or distributed.rank() != 0:
            return contextlib.nullcontext()
        return run_lock(self.path)

    # -- reading --------------------------------------------------------------------------------------------------

    def resume(self, source: str | Path | None) -> None:
        """Loads what ``resume_from`` names into a run that has not started.

        Raises:
            ConfigError: ``"auto"`` without a folder.
            CheckpointError: files are there and none is intact, or the named one is not.
        """
        if source is None:
            return
        if str(source) == "auto":
            if self.path is None:
                raise ConfigError("resume_from='auto': needs save_dir, the folder to look in")
            found = find_latest(checkpoints_in(self.path)) if self.engine.step == 0 else None
            if found is not None:
                self.restore(found[1], found[0])
                self._complete(found[0])
        elif self.engine.step > 0:
            _log.warning(
                "resume_from=%s: this trainer stands at step %d already and goes on from there; make a new one for it",
                source, self.engine.step,
            )  # fmt: skip
        else:
            self.restore(load_checkpoint(source), source)

    def find(self, path: str | Path) -> Path:
        """Returns a path as given, or if there is no such file, inside the folder."""
        path = Path(path)
        inside = path if self.path is None else self.path / path
        return inside if inside.exists() and not path.exists() else path

    def restore(self, tree: Mapping[str, Any], source: str | Path) -> None:
        """Restores a checkpoint tree in place.

        Raises:
            CheckpointError: the model or the optimizer does not fit.
        """
        engine = self.engine
        try:
            engine.load_state_dict(tree)
        except CheckpointError as error:
            raise CheckpointError(
                f"{source}: {error}. Another model needs another save_dir, or resume_from=None to start afresh here"
            ) from error
        engine.resume_source = str(source)
        _log.info("resumed from %s at step %d, epoch %d", source, engine.step, engine.epoch)

    def _complete(self, source: Path) -> None:
        """Gives the epoch its own file, if the run was killed after the best was written and before that."""
        assert self.path is not None
        own = epoch_file(self.path, self.engine.epoch)
        if source.name == BEST and self._is_due() and not own.exists() and distributed.rank() == 0:
            link_checkpoint(source, own)

    # -- writing --------------------------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        return bool(self._save_freq) and self.engine.epoch % self._save_freq == 0

    def write_epoch(
        self, *, improved: bool | None, best: float | None, scored_weights: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Writes the files of an epoch.

        A model with ``save_pretrained`` writes ``pretrained/`` with each best checkpoint, or where no epoch is selected
        with each numbered one. Of the checkpoints the best goes first: whatever a kill leaves, the newest file knows of
        the best.

        Args:
            improved: whether this is the best epoch so far; None where none is selected.
            best: the best value so far.
            scored_weights: puts the weights that evaluations score into the model.
        """
        if self.path is None:
            return
        self._history.write()
        epoch, self._written = self.engine.epoch, []
        try:
            if improved or (improved is None and self._is_due()):
                self._write_pretrained(self.path / "pretrained", scored_weights)
            if improved:
                self._save(self.path / BEST, epoch, best)
            if self._is_due():
                self._save(epoch_file(self.path, epoch), epoch, best)
        finally:
            self._written = None

    def _write_pretrained(self, path: Path, scored_weights: Callable[[], AbstractContextManager[None]]) -> None:
        model = self.engine.model
        if has_save_pretrained(model) and distributed.rank() == 0:
            with scored_weights() if self.engine.scored == "ema" else contextlib.nullcontext():
                write_pretrained(model, path)

    def write(self, path: Path, metric_value: float | None) -> None:
        """Writes one full checkpoint; the second of one epoch is a second name of the first. All ranks take part."""
        if self._written:
            if distributed.rank() == 0 and self._written[0].exists():
                link_checkpoint(self._written[0], path)
            return
        tree = self.engine.state_dict()
        if metric_value is not None:
            tree["best_metric"] = float(metric_value)
        written = save_checkpoint(tree, path) if distributed.rank() == 0 else path
        if self._written is not None:
            self._written.append(written)
