"""Files that the spectra trainer writes at the end of an epoch, and their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from treadle.checkpoint.rank_writer import RankWriter
from treadle.checkpoint.ranks import on_rank_0
from treadle.checkpoint.store import averaged_weights, copy_checkpoint, save_checkpoint, scored_weights
from treadle.engine import Engine
from treadle.engine.best import BestRule
from treadle.errors import CheckpointError
from treadle.faces.folder import CheckpointFolder, write_best_and_last
from treadle.spectra.originals import is_original, own_tree

EXTENSION = "ExtensionHook"
"""Key of a subclass's ``checkpoint_extra_state`` within the hook state."""

Selection = Literal["improved", "not improved", "last"]


class SpectraFolder(CheckpointFolder):
    """Run folder with ``checkpoints/last.pt``, ``checkpoints/best.pt`` and the exported weights.

    Args:
        engine: engine whose state is saved.
        writer: writes the files, possibly in the background.
        path: the folder.
        best: the rule that selects the best epoch, or None; reconstructed for a chemomae checkpoint without its state.
    """

    loss_settings = ("loss_type", "reduction", "loss_region")

    def __init__(self, engine: Engine, writer: RankWriter, path: Path, best: BestRule | None = None):
        super().__init__(engine, "out_dir")
        self._writer = writer
        engine.state.writers.append(writer)
        self._best = best
        self._resolved = False
        self.use(path)

    @property
    def last(self) -> Path | None:
        """File of the newest state; None if none is written."""
        return None if self.path is None else self.path / "checkpoints" / "last.pt"

    def candidates(self, folder: Path) -> Iterable[Path]:
        """Return the last and the best checkpoint, even if they are not finite."""
        return [
            folder / "checkpoints" / f"{stem}{aside}.pt" for stem in ("last", "best") for aside in ("", ".nonfinite")
        ]

    def resume_once(self, source: str | Path | None) -> None:
        """Load the checkpoint of ``resume_from`` once, and only into a run that has not started."""
        if self._resolved or self.engine.step > 0 or source is None:
            return
        self._resolved = True
        self.resume(source)

    def restore(self, tree: Mapping[str, Any], source: str | Path) -> None:
        """Restore a checkpoint tree, of this library or chemomae, in place; ``resume_from`` is then ignored.

        Raises:
            CheckpointError: the model or the optimizer does not match.
        """
        if is_original(tree):
            tree = self._translated(tree, source)
        super().restore(tree, source)
        self._resolved = True

    def _translated(self, tree: Mapping[str, Any], source: str | Path) -> dict[str, Any]:
        engine = self.engine
        engine.logger.warning(
            "%s is a checkpoint of chemomae: weights, optimizer, schedule, averages and history are restored%s",
            source,
            "" if tree.get("rng_state") else "; it has no random state, so masks and data order start over",
        )
        try:
            return own_tree(tree, engine, self._best, EXTENSION)
        except CheckpointError as error:
            raise CheckpointError(
                f"{source}: {error}. For another model use another out_dir, or resume_from=None to start over here"
            ) from error

    def complete(self, tree: Mapping[str, Any], source: Path) -> None:
        """Write ``last.pt`` and the export of the best weights, if the run was killed after ``best.pt``.

        A chemomae checkpoint is kept next to it as ``<stem>.chemomae.pt``, since the next epoch replaces the file.
        """
        if is_original(tree):
            copy_checkpoint(source, source.with_suffix(f".chemomae{source.suffix}"))
        elif self.path is not None and source == self.path / "checkpoints" / "best.pt":
            save_checkpoint(scored_weights(tree), self.path / "best_model.pt")
            copy_checkpoint(source, source.with_name("last.pt"))

    def write_epoch(self, selection: Selection, *, background: bool) -> None:
        """Write the files of an epoch; a collective call."""
        folder = self.path
        assert folder is not None
        self.before_write()
        state, step = self.engine.state, self.engine.step

        def write(tree: Mapping[str, Any]) -> None:
            write_epoch(tree, folder, selection)
            state.record_saved(folder / "checkpoints" / "last.pt", step)  # not before it is

        self._writer.save_file(lambda buffers: self.engine.state_dict(buffers=buffers), write, background=background)
        self.record_written()

    def write_checkpoints(self, *, is_best: bool) -> None:
        """Write ``checkpoints/last.pt``, and ``checkpoints/best.pt`` if it is the best; a collective call."""
        folder = self.path
        assert folder is not None
        self._writer.wait()
        self.before_write()
        tree = self.engine.state_dict()
        on_rank_0(lambda: write_best_and_last(tree, folder / "checkpoints", is_best=is_best))

    def write_last(self) -> None:
        """Write ``checkpoints/last.pt``; a collective call."""
        self.write_checkpoints(is_best=False)


def write_epoch(tree: Mapping[str, Any], out_dir: Path, selection: Selection) -> None:
    """Write the exports and checkpoints of an epoch from a copy of its state only.

    The exports are written first and ``last.pt`` last: if killed in between, the run repeats this epoch and writes
    everything again.

    Args:
        tree: a checkpoint tree.
        out_dir: the run folder.
        selection: whether this is the best epoch so far; ``"last"`` for a fixed budget, without a best epoch.
    """
    if selection == "improved":
        save_checkpoint(scored_weights(tree), out_dir / "best_model.pt")
    elif selection == "last":
        save_checkpoint(tree["model"], out_dir / "last_model.pt")
        if (averaged := averaged_weights(tree)) is not None:  # nothing was validated
            save_checkpoint(averaged, out_dir / "ema_last_model.pt")
    write_best_and_last(tree, out_dir / "checkpoints", is_best=selection == "improved")
