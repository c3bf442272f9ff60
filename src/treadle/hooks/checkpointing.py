"""CheckpointingHook: numbered checkpoints by step, a link to the newest, and resuming."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle import distributed
from treadle.checkpoint.files import link_in_folder, remove_link
from treadle.checkpoint.lock import check_free, leftovers, run_lock
from treadle.checkpoint.order import StateProgress
from treadle.checkpoint.ranks import held_by_rank_0, on_rank_0, open_on_ranks, writers_group
from treadle.checkpoint.shard_manifest import is_whole, remove_unfinished, unfinished
from treadle.checkpoint.store import Retention, find_latest, link_sibling, save_checkpoint
from treadle.engine.signals import ExitCode, ExitPlan, exit_plan
from treadle.errors import CheckpointError, ConfigError, NonFiniteError
from treadle.errors.arguments import check_least, checked, is_whole_number
from treadle.hooks.files import in_workspace
from treadle.hooks.saving import SavingHook, equal_names

if TYPE_CHECKING:
    from treadle.engine import Engine

_PATTERN = r"checkpoint_step_(\d+)(?:\.pt|/)"
_FOLDER = r"checkpoint_step_\d+(?:\.nonfinite)?"
_FILE = rf"{_FOLDER}\.pt"
_LATEST = "checkpoint_latest"


def step_states(folder: Path) -> list[Path]:
    """Return the states that a CheckpointingHook wrote to a folder: files, complete folders of shards, then links.

    Example:
        >>> step_states(Path("no_such_folder"))
        []
    """
    numbered = sorted(folder.glob("checkpoint_step_*"))
    files = [path for path in numbered if re.fullmatch(_FILE, path.name)]
    folders = [path for path in numbered if re.fullmatch(_FOLDER, path.name) and is_whole(path)]
    links = [folder / name for name in (_LATEST, f"{_LATEST}.pt") if os.path.lexists(folder / name)]
    return [*files, *folders, *links]


def settled_states(folder: Path) -> list[Path]:
    """Remove unfinished files of a killed run from a folder that no other process holds, and return its states.

    Called before any event, so that no hook touches the files of another run.

    Raises:
        CheckpointError: another process trains in the folder.
    """
    check_free(folder)
    left = unfinished(folder, _FOLDER)
    if left or leftovers(folder):
        with run_lock(folder):  # which removes temporary files
            for path in left:
                remove_unfinished(path)
    return step_states(folder)


def _link_to(found: Path) -> None:
    """Point the link to the state that a run resumes from: a kill may have prevented that."""
    link = found.with_name(f"{_LATEST}{found.suffix}")
    numbered = not found.is_symlink() and ".nonfinite" not in found.name
    if numbered and not (link.exists() and link.samefile(found)):
        with contextlib.suppress(CheckpointError):  # the next save reports an unwritable link
            link_sibling(found, link.name)


class CheckpointingHook(SavingHook):
    """Hook that saves ``checkpoint_step_{step}.pt`` every ``interval`` steps, at the last step and on signals.

    For a sharded model it saves a folder ``checkpoint_step_{step}``, to which every rank writes its part. Incomplete
    folders are ignored: one left unfinished by a killed rank is removed when the next run starts. Both formats resume
    on any number of ranks, sharded or not.

    Args:
        interval: steps between checkpoints, >= 1.
        keep_previous: number of checkpoints to keep, including the newest; None keeps all.
        keep_interval: also save, and never delete, steps divisible by this; None or 0 turns it off.
        path: folder; relative to the trainer's workspace.
        load: ``"latest"``: the furthest intact state in the folder, regardless of file times; a path (a bare name is
            looked up inside ``path``); or None.
        exit_signals: one or several signals on which to save and exit; None installs no handler.
        exit_code: ``"128+signal"`` or a number.
        exit_wait: seconds or a timedelta to sleep between saving and exiting.
        background: copy the state and write it during training. One write at a time: saves, the end of the run and
            signals wait for the previous write. A failed write raises at the next step. This takes host memory for one
            copy of the state during the run; for a folder, of each rank's part.
        sharded: True writes folders, False single files, also for a sharded model, whose weights then pass through rank
            0 one by one; None: folders if the model is sharded and ``state_dict_options`` do not request full states.
        keep_steps: also save, and never delete, these steps.

    Only one process at a time may train in a folder; a second one is refused before it reads or writes anything.

    Raises:
        ConfigError: a value is outside its range.

    Example:
        >>> hook = CheckpointingHook(interval=1000, keep_previous=2)
    """

    @checked
    def __init__(
        self,
        interval: int,
        keep_previous: int | None = 2,
        keep_interval: int | None = None,
        path: str | Path = "checkpoints",
        load: str | Path | None = "latest",
        exit_signals: int | Sequence[int] | None = None,
        exit_code: ExitCode = "128+signal",
        exit_wait: float | timedelta = 0.0,
        *,
        background: bool = False,
        sharded: bool | None = None,
        keep_steps: Collection[int] = (),
    ):
        check_least(1, interval=interval, keep_previous=keep_previous)
        check_least(0, keep_interval=keep_interval)
        if not all(is_whole_number(step, 1) for step in keep_steps):
            raise ConfigError("must be step numbers, >= 1", argument="keep_steps", value=keep_steps)
        super().__init__(background=background)
        self.interval = interval
        self.keep_interval = keep_interval or None
        self.keep_steps = frozenset(keep_steps)
        self.retention = Retention(keep_previous, self.keep_interval, self.keep_steps)
        self.path = Path(path)
        self.load = load
        self._exit = (exit_signals, exit_code, exit_wait)
        exit_plan(exit_signals, lambda: None, code=exit_code, wait=exit_wait)  # validates the values now
        self._resumed_from: Path | None = None
        self._sharded = sharded

    def folder(self, trainer: Engine) -> Path:
        """Return the folder of the checkpoints.

        Raises:
            ConfigError: the path is relative and the trainer has no workspace.
        """
        return in_workspace(trainer, self.path)

    def checkpoint_to_resume(self, trainer: Engine) -> Mapping[str, Any] | None:
        """Load the checkpoint that ``load`` names.

        Raises:
            CheckpointError: another process trains in the folder, or no file is intact.
        """
        self._resumed_from = None
        folder = self.folder(trainer)
        states = on_rank_0(lambda: settled_states(folder))
        if self.load is None:
            return None
        if self.loads_latest and trainer.state.searched:
            source = Path(trainer.state.source or "")
            self._resumed_from = source if source.parent == folder else None
            return None
        if not self.loads_latest:
            path = Path(self.load)
            inside = folder / path
            self._resumed_from = inside if len(path.parts) == 1 and inside.exists() else path
            trainer.state.record_source(self._resumed_from)
            return open_on_ranks(self._resumed_from)
        found = find_latest(states, load=open_on_ranks)
        if found is None:
            return None
        path, tree = found
        self._resumed_from = path
        on_rank_0(lambda: _link_to(path))
        trainer.state.record_source(path)
        return tree

    @property
    def loads_latest(self) -> bool:
        """Whether a run resumes from the furthest state in the folder."""
        return str(self.load) == "latest"

    def claim(self, trainer: Engine) -> AbstractContextManager[None]:
        """Lock the folder for this process, which also checks early that it is writable."""
        return held_by_rank_0(self.folder(trainer))

    def on_before_train(self, trainer: Engine) -> None:
        """Prepare for writing."""
        if self._writes_folders(trainer):
            writers_group()  # created here, where all ranks are at the same point
        trainer.state.origin.watch(self.folder(trainer), step_states)
        self._saved = None if self._resumed_from is None else StateProgress(trainer.step, trainer.epoch)

    def _is_due(self, trainer: Engine) -> bool:
        """Return whether the current step is in the interval, one to keep, or the last one."""
        step = trainer.step
        due = step % self.interval == 0 or step in self.keep_steps or trainer.is_last_step
        return due or bool(self.keep_interval and step % self.keep_interval == 0)

    def steps_ahead(self, trainer: Engine) -> int | None:
        """Allow steps up to the next checkpoint; every step is checked while one is being written."""
        if self._writer.in_flight:
            return 1
        due = self.interval - trainer.step % self.interval
        kept = [self.keep_interval - trainer.step % self.keep_interval] if self.keep_interval else []
        return min([due, *kept, *(step - trainer.step for step in self.keep_steps if step > trainer.step)])

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Wait for the background write; after a non-finite gradient, log which checkpoints to go back to."""
        super().on_close(trainer, error)
        if isinstance(error, NonFiniteError) and distributed.rank() == 0:
            folder = self.folder(trainer)
            links = [folder / name for name in (f"{_LATEST}.pt", _LATEST) if (folder / name).exists()]
            if links:  # links never point to a non-finite state
                trainer.logger.error("the last good checkpoint is %s", os.path.realpath(links[0]))

    def exit_plan(self, trainer: Engine) -> ExitPlan | None:
        """Save on a signal, if signals are given."""
        signals, code, wait = self._exit
        return exit_plan(signals, lambda: self._save_and_leave(trainer), code=code, wait=wait)

    def _begin_save(self, trainer: Engine, *, background: bool) -> None:
        """Write the checkpoint of the current step, point the link to it and prune."""
        trainer.state.origin.clear()
        if self._writes_folders(trainer):
            self._writer.save_folder(
                lambda buffers: trainer.state_dict(buffers=buffers, parts=True), self._write_folder(trainer),
                background=background,
            )  # fmt: skip
        else:
            self._writer.save_file(
                lambda buffers: trainer.state_dict(buffers=buffers), self._write_file(trainer), background=background
            )

    def _writes_folders(self, trainer: Engine) -> bool:
        if self._sharded is None:
            return distributed.is_sharded(trainer.model) and not trainer.state.options.full_state_dict
        return self._sharded

    def _write_file(self, trainer: Engine) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that writes a copy of the current state, independent of the trainer and the hook."""
        target = self.folder(trainer) / f"checkpoint_step_{trainer.step}.pt"
        finish = self._finisher(trainer)

        def write(tree: Mapping[str, Any]) -> None:
            if save_checkpoint(tree, target) == target:
                finish(target)  # else it is not finite and moved aside, without linking or pruning

        return write

    def _write_folder(self, trainer: Engine) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that writes this rank's part of the current state and, on rank 0, publishes the folder."""
        target = self.folder(trainer) / f"checkpoint_step_{trainer.step}"
        equal, finish = equal_names(trainer), self._finisher(trainer)

        from treadle.checkpoint.sharded import save_sharded

        def write(tree: Mapping[str, Any]) -> None:
            save_sharded(tree, target, equal=equal, finish=finish)

        return write

    def _finisher(self, trainer: Engine) -> Callable[[Path], None]:
        """Return a function that points the link to a new checkpoint and prunes old ones."""
        protect = [] if self._resumed_from is None else [self._resumed_from]
        retention, state, step = self.retention, trainer.state, trainer.step

        def finish(target: Path) -> None:
            link_sibling(target, f"{_LATEST}{target.suffix}")
            for other in {f"{_LATEST}.pt", _LATEST} - {f"{_LATEST}{target.suffix}"}:
                remove_link(target.with_name(other))  # left by a run that wrote the other format
            if target.parent.name == "checkpoints" and target.is_file():
                link_in_folder(target, target.with_name("last.pt"))  # the same name for every front end
            retention.prune(target.parent, _PATTERN, [target, *protect], newest=step)
            state.record_saved(target, step)

        return finish
