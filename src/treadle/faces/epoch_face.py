"""Methods of every face of epochs for a trained model: validate, test and save."""

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
    """Trainer of epochs, made of an engine and an epoch driver."""

    _epochs: EpochTrainer
    _folder: CheckpointFolder

    def validate(self, loader: Iterable[Any] | Mapping[str, Iterable[Any]]) -> dict[str, Any]:
        """Return the results over a loader, as an epoch's validation has them; training does not notice.

        The averaged weights are scored if there is an average, and ``limit_eval_batches`` counts.

        Args:
            loader: batches; of a dict each loader, with its name before those of its results.

        Raises:
            ConfigError: a loader is empty.
        """
        return self._epochs.evaluate_each(loader)

    def test(self, loader: Iterable[Any] | Mapping[str, Iterable[Any]]) -> dict[str, Any]:
        """Return the results over the whole loader, as :meth:`validate` does without a limit.

        Raises:
            ConfigError: a loader is empty.
        """
        with self._engine.evaluations_limited_to(None):
            return self._epochs.evaluate_each(loader)

    def save(self, path: str | Path) -> Path:
        """Write a checkpoint of everything that a run needs to resume exactly; all ranks take part.

        Returns:
            The file; another name beside it where the weights are not finite.

        Raises:
            CheckpointError: it cannot be written.
        """
        return save_state(self._engine, path)

    def load_from(self, tree: Mapping[str, Any], source: Path, *, folder: Path | None) -> None:
        """Restore a state and set the folder to write to.

        Args:
            tree: of a checkpoint.
            source: its file.
            folder: the folder of the run; None writes nothing.

        Raises:
            CheckpointError: the model or the optimizer does not fit.
        """
        self._folder.use(folder)
        self._folder.restore(tree, source)


def save_state(engine: Engine, path: str | Path) -> Path:
    """Write the whole state of a run to one file; all ranks take part.

    Args:
        engine: to save.
        path: the file.

    Returns:
        The file; another name beside it where the weights are not finite.

    Raises:
        CheckpointError: it cannot be written.
    """
    tree = engine.state_dict()
    return on_rank_0(lambda: save_checkpoint(tree, Path(path)))
