"""Folder of a run: locked by one process, read when a run resumes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from treadle.checkpoint.files import link_in_folder, why_unwritable
from treadle.checkpoint.order import StateProgress, is_moved_aside
from treadle.checkpoint.ranks import held_by_rank_0, on_rank_0, open_on_ranks
from treadle.checkpoint.store import copy_checkpoint, find_latest, save_checkpoint
from treadle.engine import Engine
from treadle.engine.signal_exit import SignalsBetweenRuns
from treadle.errors import CheckpointError, ConfigError
from treadle.hooks.checkpointing import CheckpointingHook, settled_states, step_states

_INNER = "checkpoints"


def loss_name(loss_fn: Any) -> str:
    """Return the name of a loss in a checkpoint's config, the same in every process.

    Example:
        >>> loss_name(loss_name), loss_name(None)
        ('loss_name', 'None')
    """
    text = repr(loss_fn)
    return getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__) if " at 0x" in text else text


def warn_of_other_loss(engine: Engine, tree: Mapping[str, Any], settings: Iterable[str]) -> None:
    """Warn if a checkpoint was trained on another loss, since the run would mix the values of both.

    Args:
        engine: engine with the settings of this run in its ``config``.
        tree: checkpoint tree.
        settings: keys of the config that describe the loss.
    """
    saved, own = tree.get("config") or {}, engine.config or {}
    both = [key for key in settings if key in saved and key in own]
    other = [f"{key}={saved[key]!r} (here {own[key]!r})" for key in both if saved[key] != own[key]]
    if other:
        engine.logger.warning(
            "the checkpoint was trained with another loss: %s. Its history, best value and optimizer state come from "
            "that loss and remain in use; to avoid this, start a new run elsewhere from load_weights(...)",
            ", ".join(other),
        )  # fmt: skip


class CheckpointFolder:
    """Checkpoints of a trainer, to find and load; a subclass defines their names.

    Args:
        engine: engine whose state they hold.
        argument: name of the trainer's argument for the folder, for messages.

    Attributes:
        path: the folder; None writes nothing.
        loss_settings: keys of the engine's config that describe the loss.
    """

    loss_settings: tuple[str, ...] = ()

    def __init__(self, engine: Engine, argument: str):
        self.engine = engine
        self._argument = argument
        self._on_disk: StateProgress | None = None
        self._replayed = False
        self.path: Path | None = None

    def use(self, path: str | Path | None) -> None:
        """Set the folder, resolved now, since a callback may change the working directory; None for no folder."""
        if path is not None and Path(path).exists() and not Path(path).is_dir():
            raise ConfigError("is a file; give a folder", argument=self._argument, value=str(path))
        trial = self.engine.settings.limits.fast_dev_run
        before, self.path = self.path, None if path is None or trial else Path(path).absolute()
        self.engine.workspace = self.path
        if self.path != before:
            self._on_disk = None
        if self.path is not None:
            self.engine.state.origin.watch(self.path, self.states)

    def held(self) -> AbstractContextManager[None]:
        """Lock the folder for this run inside the block, unless the run is replayed; collective.

        Raises:
            CheckpointError: another process holds the lock; raised on all ranks.
            ConfigError: the folder can be neither written nor created.
        """
        if self.path is not None:
            self.engine.prepare()  # an observer may be about to replay the run
            self._replayed = any(hook.replays for hook in self.engine.hooks)
        if self._replayed:
            if self.engine.workspace == self.path:  # else an observer has moved it
                self.engine.workspace = None
            self.path = None
        if self.path is not None:
            on_rank_0(self._refuse_unwritable)
        return contextlib.nullcontext() if self.path is None else held_by_rank_0(self.path)

    def _refuse_unwritable(self) -> None:
        reason = None if self.path is None else why_unwritable(self.path)
        if reason is not None:
            raise ConfigError(f"{reason}; choose another folder", argument=self._argument, value=str(self.path))

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Lock the folder inside the block and write the final state at its end, for which signals wait."""
        with self.held():
            self.engine.prepare()  # removes writing hooks from a short trial run
            with SignalsBetweenRuns(self.engine) as between:
                yield
                with between.handled():
                    self.write_end()

    def candidates(self, folder: Path) -> Iterable[Path]:
        """Return the trainer's own checkpoints in a folder; among equally far ones, the first is resumed from."""
        raise NotImplementedError

    def states(self, folder: Path) -> list[Path]:
        """Return every state in a folder: the trainer's own, then those written by a CheckpointingHook."""
        by_step = [state for place in (folder, folder / "checkpoints") for state in step_states(place)]
        return [*self.candidates(folder), *by_step]

    def _states_of_run(self) -> list[Path]:
        """Return the candidates of ``resume_from="auto"``, from every writer of the run."""
        assert self.path is not None
        hooks = [hook for hook in self.engine.hooks if isinstance(hook, CheckpointingHook) and hook.loads_latest]
        by_hooks = [state for hook in hooks for state in settled_states(hook.folder(self.engine))]
        return [*self.states(self.path), *by_hooks]

    # -- writing --------------------------------------------------------------------------------------------------

    def before_write(self) -> None:
        """Move aside states of earlier runs that could be mistaken for the coming one; collective."""
        self.engine.state.origin.clear()

    def record_written(self) -> None:
        """Record that a file holds the current state."""
        self._on_disk = StateProgress(self.engine.step, self.engine.epoch)

    def name_state(self, path: Path, *, best: bool) -> None:
        """Point ``checkpoints/best.pt`` or ``checkpoints/last.pt``, which every front end has, to a state; on rank 0.

        Args:
            path: the state, in the folder.
            best: whether to set the best or the last one.
        """
        folder = self.path
        if folder is None or folder.name == _INNER or path.parent != folder or is_moved_aside(path):
            return
        link_in_folder(path, folder / _INNER / ("best.pt" if best else "last.pt"))

    def name_best_and_last(self, best: Path, last: Path) -> None:
        """Point both names to states that exist; on rank 0."""
        for path, is_best in ((best, True), (last, False)):
            if path.exists():
                self.name_state(path, best=is_best)

    def named_source(self) -> list[Path]:
        """Return the file that the user named to resume from, which no rule deletes; None if it was found."""
        state = self.engine.state
        return [] if state.source is None or state.searched else [Path(state.source)]

    def write_end(self) -> None:
        """Write the final state of a run if no file holds it; collective."""
        now = StateProgress(self.engine.step, self.engine.epoch)
        if self.path is not None and now not in (self._on_disk, self.engine.state.origin.reach):
            self.write_last()
            self.record_written()

    def write_last(self) -> None:
        """Write the current state to a file that :meth:`candidates` lists; collective."""
        raise NotImplementedError

    def resume(self, source: str | Path | None) -> Path | None:
        """Load what ``resume_from`` names into a run that has not started.

        Returns:
            The file that ``"auto"`` found and loaded, else None.

        Raises:
            ConfigError: ``"auto"`` without a folder.
            CheckpointError: there are files but none is intact, or the named file is not intact.
        """
        if source is None or self._replayed or self.engine.settings.limits.fast_dev_run:
            return None
        if str(source) == "auto":
            if self.path is None:
                raise ConfigError(f"='auto': needs {self._argument}, the folder to search", argument="resume_from")
            if self.engine.step > 0:
                return None
            found = find_latest(on_rank_0(self._states_of_run), load=open_on_ranks)
            if found is None:
                return None
            self.engine.state.record_searched()
            self.restore(found[1], found[0])
            on_rank_0(lambda: self.complete(found[1], found[0]))
            return found[0]
        if self.engine.step > 0:
            self.engine.logger.warning(
                "resume_from=%s is ignored: this trainer is already at step %d and continues from there; create a "
                "new trainer to load it",
                source, self.engine.step,
            )  # fmt: skip
        else:
            source = self.find(source)
            if source.is_dir() and (files := list(self.candidates(source))):
                raise ConfigError(
                    f"is a run folder; pass one of its files, such as {str(files[0])!r}, or pass 'auto' and "
                    f"{self._argument}={str(source)!r} for the latest one",
                    argument="resume_from", value=str(source),
                )  # fmt: skip
            self.restore(open_on_ranks(source), source)
        return None

    def complete(self, tree: Mapping[str, Any], source: Path) -> None:
        """Write the files that a kill after ``source`` prevented, on rank 0; a no-op by default.

        Args:
            tree: the state that the run resumes from.
            source: file of the state.
        """

    def find(self, path: str | Path) -> Path:
        """Return the path as given, or inside the folder if there is no such file."""
        path = Path(path)
        inside = path if self.path is None else self.path / path
        return inside if inside.exists() and not path.exists() else path

    def restore(self, tree: Mapping[str, Any], source: str | Path) -> None:
        """Restore a checkpoint tree in place.

        Raises:
            CheckpointError: the model or the optimizer does not fit.
        """
        engine = self.engine
        try:
            engine.load_state_dict(tree)
        except CheckpointError as error:
            raise CheckpointError(
                f"{source}: {error}. To train another model, use another {self._argument}, or resume_from=None to "
                "start from scratch here"
            ) from error
        warn_of_other_loss(engine, tree, self.loss_settings)
        engine.state.record_source(source)
        text = "resumed from %s at step %d, epoch %d"
        engine.logger.info(text, source, engine.step, engine.epoch, extra={"topic": "resumed"})


def write_best_and_last(tree: Mapping[str, Any], folder: Path, *, is_best: bool, last_name: str = "last.pt") -> None:
    """Write ``best.pt`` if improved, then the last, so that after a kill the furthest file records the best."""
    best, last = folder / "best.pt", folder / last_name
    if is_best and save_checkpoint(tree, best) == best:
        copy_checkpoint(best, last)
    else:
        save_checkpoint(tree, last)
