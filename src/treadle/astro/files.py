"""Checkpoint files of a run: by step, by epoch, and the best."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.astro.originals import is_original, own_tree
from treadle.astro.vocab import VocabSpec
from treadle.checkpoint.ranks import on_rank_0
from treadle.checkpoint.retention import Retention
from treadle.checkpoint.store import copy_checkpoint, save_checkpoint
from treadle.engine.hook import BaseHook
from treadle.errors import CheckpointError
from treadle.errors.arguments import check_least
from treadle.faces.folder import CheckpointFolder, write_best_and_last

if TYPE_CHECKING:
    from treadle.engine import Engine

_ANY = re.compile(r"(ckpt_step_\d+|ckpt_epoch_\d+|best)(\.nonfinite)?\.pt")


def layout_of(vocab: VocabSpec) -> dict[str, Any]:
    """Return the vocabulary layout that is stored in a checkpoint.

    Example:
        >>> layout_of(VocabSpec(2, 4, 2, ("a",), 2))["base_spectrum"]
        {'a': 11}
    """
    names = ("vocab_size", "base_image", "base_scalar", "base_spectrum", "scalar_bins")
    return {name: getattr(vocab, name) for name in names}


class AstroFolder(CheckpointFolder):
    """Folder of ``ckpt_step_{step:08d}.pt``, ``ckpt_epoch_{epoch:03d}.pt`` and ``best.pt``.

    Args:
        engine: engine whose state is saved.
        vocab: the vocabulary that a checkpoint must match.
        path: the folder; None writes nothing.
        save_total_limit: how many of the newest checkpoints to keep, of epochs and of steps each; None keeps all.
    """

    loss_settings = ("loss_config", "use_ce")

    def __init__(
        self,
        engine: Engine,
        vocab: VocabSpec,
        *,
        path: str | Path | None = None,
        save_total_limit: int | None = None,
    ):
        super().__init__(engine, "output_dir")
        self._layout = layout_of(vocab)
        check_least(1, save_total_limit=save_total_limit)
        self._retention = Retention(save_total_limit)
        self.use(path)

    def candidates(self, folder: Path) -> Iterable[Path]:
        """Return every checkpoint, including non-finite ones, with the best last."""
        found = [path for path in sorted(folder.glob("*.pt")) if _ANY.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.name.startswith("best"))

    def resume(self, source: str | Path | None) -> Path | None:
        """Load ``resume_from``; write an epoch's missing file if a kill left only its ``best.pt``."""
        found = super().resume(source)
        if found is not None and found.name == "best.pt":
            own = found.with_name(self._epoch_name())
            on_rank_0(lambda: None if own.exists() else copy_checkpoint(found, own))
        return found

    def restore(self, tree: Mapping[str, Any], source: str | Path) -> None:
        """Restore a checkpoint tree in place.

        Raises:
            CheckpointError: the vocabulary, the model or the optimizer does not match.
        """
        if is_original(tree):
            self.engine.logger.warning(
                "%s is a checkpoint of astromodal: weights, optimizer and counters are restored; it has no random "
                "state, so the data order starts over", source,
            )  # fmt: skip
            tree = own_tree(tree, self.engine)
        saved = tree.get("config") or {}
        wrong = [
            f"{name} is {saved[name]} there and {own} here"
            for name, own in self._layout.items()
            if name in saved and saved[name] != own
        ]
        if wrong:
            raise CheckpointError(
                f"{source} has a different vocabulary: {'; '.join(wrong)}. Build the vocabulary that it was trained "
                "with, or start a new run in another output_dir"
            )
        super().restore(tree, source)

    def _epoch_name(self) -> str:
        return f"ckpt_epoch_{self.engine.epoch:03d}.pt"

    def write_epoch(self, *, improved: bool) -> None:
        """Write the checkpoint of the epoch, and ``best.pt`` if it improved; a collective call."""
        folder, name = self.path, self._epoch_name()
        if folder is None:
            return
        self.before_write()
        tree = self.engine.state_dict()
        on_rank_0(lambda: write_best_and_last(tree, folder, is_best=improved, last_name=name))
        on_rank_0(lambda: self.name_best_and_last(folder / "best.pt", folder / name))
        protected = [folder / name, *self.named_source()]
        on_rank_0(lambda: self._retention.prune(folder, r"ckpt_epoch_(\d+)\.pt", protected, newest=self.engine.epoch))
        self.engine.state.record_saved(folder / name, self.engine.step)
        self.record_written()

    def write_last(self) -> None:
        """Write the current state under its step number; a collective call."""
        self.write_step()

    def write_step(self) -> None:
        """Write the checkpoint of the current step; a collective call."""
        if self.path is not None:
            folder = self.path
            step = self.engine.step
            protected = [self.write(folder / f"ckpt_step_{step:08d}.pt"), *self.named_source()]
            on_rank_0(lambda: self._retention.prune(folder, r"ckpt_step_(\d+)\.pt", protected, newest=step))

    def write(self, path: Path) -> Path:
        """Write the current state to a file; a collective call."""
        self.before_write()
        tree = self.engine.state_dict()
        written = on_rank_0(lambda: save_checkpoint(tree, path))
        if _ANY.fullmatch(path.name):
            on_rank_0(lambda: self.name_state(written, best=False))
        return written


class StepCheckpoints(BaseHook):
    """Hook that requests a checkpoint at a fixed step interval and keeps them all.

    Args:
        write: writes the checkpoint.
        interval: steps between checkpoints, >= 1.
    """

    def __init__(self, write: Callable[[], object], interval: int):
        self._write = write
        self._interval = interval

    def on_after_step(self, trainer: Engine) -> None:
        """Request the checkpoint; it is written once every hook has seen the step."""
        if trainer.step % self._interval == 0:
            trainer.request_write(self._write)
