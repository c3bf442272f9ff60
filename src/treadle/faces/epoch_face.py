"""Methods of every epoch-based front end for a trained model: validate, test and save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from treadle.checkpoint.ranks import on_rank_0
from treadle.checkpoint.store import save_checkpoint
from treadle.engine import Engine
from treadle.faces.build import EngineCounters
from treadle.faces.epochs import EpochTrainer
from treadle.faces.folder import CheckpointFolder


class EpochFace(EngineCounters):
    """Epoch-based trainer with an engine and an epoch driver."""

    _epochs: EpochTrainer
    _folder: CheckpointFolder

    def validate(self, loader: Iterable[Any] | Mapping[str, Iterable[Any]]) -> dict[str, Any]:
        """Return the results over a loader, like an epoch's validation, without affecting training.

        The averaged weights are evaluated if there are any, and ``limit_eval_batches`` applies.

        Args:
            loader: batches, or a dict of loaders, whose names prefix the names of their results.

        Raises:
            ConfigError: a loader is empty.
        """
        return self._epochs.evaluate_each(loader)

    def test(self, loader: Iterable[Any] | Mapping[str, Iterable[Any]]) -> dict[str, Any]:
        """Return the results over the whole loader, like :meth:`validate` without a limit.

        Raises:
            ConfigError: a loader is empty.
        """
        with self._engine.evaluations_limited_to(None):
            return self._epochs.evaluate_each(loader)

    def save(self, path: str | Path) -> Path:
        """Write a checkpoint of everything that a run needs to resume exactly; collective.

        Returns:
            The path of the file, under another name in the same folder if the weights are not finite.

        Raises:
            CheckpointError: the file cannot be written.
        """
        return save_state(self._engine, path)

    def load_from(self, tree: Mapping[str, Any], source: Path, *, folder: Path | None) -> None:
        """Restore a state and set the output folder.

        Args:
            tree: checkpoint tree.
            source: file of the checkpoint.
            folder: the folder of the run; None writes nothing.

        Raises:
            CheckpointError: the state does not fit the model or the optimizer.
        """
        self._folder.use(folder)
        self._folder.restore(tree, source)


def save_state(engine: Engine, path: str | Path) -> Path:
    """Write the whole state of a run to one file; collective.

    Args:
        engine: engine to save.
        path: the file.

    Returns:
        The path of the file, under another name in the same folder if the weights are not finite.

    Raises:
        CheckpointError: the file cannot be written.
    """
    tree = engine.state_dict()
    return on_rank_0(lambda: save_checkpoint(tree, Path(path)))
