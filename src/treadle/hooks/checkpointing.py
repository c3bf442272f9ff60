"""CheckpointingHook: numbered checkpoints by step, a link to the newest, and resuming from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle import distributed
from treadle.checkpoint.lock import RunLock, check_free
from treadle.checkpoint.store import Retention, find_latest, load_checkpoint, point_to, save_checkpoint
from treadle.checkpoint.writer import CheckpointWriter
from treadle.errors import CheckpointError, ConfigError
from treadle.hooks.base import BaseHook
from treadle.hooks.files import in_workspace
from treadle.signals import ExitCode, ExitPlan, exit_plan

if TYPE_CHECKING:
    from treadle.engine import Engine

_PATTERN = r"checkpoint_step_(\d+)\.pt"
_ANY = r"checkpoint_step_\d+(\.nonfinite)?\.pt"
_LATEST = "checkpoint_latest.pt"


class CheckpointingHook(BaseHook):
    """Saves ``checkpoint_step_{step}.pt`` every ``interval`` steps, at the last step and at a signal.

    Args:
        interval: steps between checkpoints, >= 1.
        keep_previous: how many of the newest to keep, the newest included; None keeps all.
        keep_interval: also save, and never delete, steps divisible by this; None or 0: off.
        path: folder; a relative one lies in the trainer's workspace.
        load: ``"latest"``, a path (a bare name is looked up inside ``path``), or None.
        exit_signals: a signal or several that save and leave; None installs no handler.
        exit_code: ``"128+signal"`` or a number.
        exit_wait: seconds or a timedelta to sleep between saving and leaving.
        background: copy the state and write it while training goes on. One write at a time: a save that comes while
            another is written waits for it, as the end of the run and a signal do. A write that failed raises at the
            next step. Costs host memory for one copy of the state during the run.

    One process at a time trains in a folder; a second one is refused before it reads or writes anything.

    Raises:
        ConfigError: a value is outside its range.

    Example:
        >>> hook = CheckpointingHook(interval=1000, keep_previous=2)
    """

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
    ):
        if interval < 1:
            raise ConfigError(f"interval={interval!r}: must be at least 1 step")
        if keep_previous is not None and keep_previous < 1:
            raise ConfigError(f"keep_previous={keep_previous!r}: the newest checkpoint always stays; use 1 or more")
        if keep_interval is not None and keep_interval < 0:
            raise ConfigError(f"keep_interval={keep_interval!r}: must be >= 1 step, or None or 0 to turn it off")
        self.interval = interval
        self.keep_interval = keep_interval or None
        self.retention = Retention(keep_previous, self.keep_interval)
        self.path = Path(path)
        self.load = load
        self._exit = (exit_signals, exit_code, exit_wait)
        exit_plan(exit_signals, lambda: None, code=exit_code, wait=exit_wait)  # refuse bad values now
        self._saved_step: int | None = None
        self._resumed_from: Path | None = None
        self._lock = RunLock()
        self._background = background
        self._writer = CheckpointWriter()

    def folder(self, trainer: Engine) -> Path:
        """Returns the folder of the checkpoints.

        Raises:
            ConfigError: the path is relative and the trainer has no workspace.
        """
        return in_workspace(trainer, self.path)

    def checkpoint_to_resume(self, trainer: Engine) -> Mapping[str, Any] | None:
        """Reads what ``load`` names.

        Raises:
            CheckpointError: another process trains in this folder, or no file is intact.
        """
        folder = self.folder(trainer)
        if distributed.rank() == 0:
            check_free(folder)  # before any event, so that no hook touches the files of the other run
        if self.load is None:
            return None
        if str(self.load) != "latest":
            path = Path(self.load)
            inside = folder / path
            self._resumed_from = inside if len(path.parts) == 1 and inside.exists() else path
            trainer.resume_source = str(self._resumed_from)
            return load_checkpoint(self._resumed_from)
        link = folder / _LATEST  # a copy, where there are no links, and then as good as the others
        candidates = [path for path in folder.glob("checkpoint_step_*.pt") if re.fullmatch(_ANY, path.name)]
        found = find_latest([*candidates, link], prefer=link)
        if found is None:
            return None
        self._resumed_from, tree = found
        trainer.resume_source = str(self._resumed_from)
        return tree

    def on_before_train(self, trainer: Engine) -> None:
        """Takes the folder for this process, and so checks that it can be written before any work is lost."""
        if distributed.rank() == 0:
            self._lock.take(self.folder(trainer))
        self._saved_step = trainer.step if self._resumed_from is not None else None

    def on_after_step(self, trainer: Engine) -> None:
        """Asks for a checkpoint when one is due; it is written once every hook has seen the step."""
        if self._writer.landed:
            trainer.request_write(self.wait_for_writes)
        due = trainer.step % self.interval == 0 or trainer.is_last_step
        if due or (self.keep_interval and trainer.step % self.keep_interval == 0):
            trainer.request_write(lambda: self.save(trainer))

    def on_after_train(self, trainer: Engine) -> None:
        """Saves the last step of a run that was stopped early, and waits for what is being written."""
        trainer.request_write(lambda: self.save(trainer))
        trainer.request_write(self.wait_for_writes)

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Waits for what is being written and gives the folder back."""
        try:
            self._writer.close(error)
        finally:
            self._lock.release()

    def exit_plan(self, trainer: Engine) -> ExitPlan | None:
        """Saves at a signal, if signals were named."""
        signals, code, wait = self._exit
        return exit_plan(signals, lambda: self._save_and_leave(trainer), code=code, wait=wait)

    def save(self, trainer: Engine) -> None:
        """Writes the checkpoint of the present step, points the link to it and prunes; once per step.

        With ``background=True`` it returns once the state is copied.

        Raises:
            CheckpointError: it could not be written, or the one before could not.
        """
        self._save(trainer, background=self._background)

    def _save_and_leave(self, trainer: Engine) -> None:
        late = self._writer.settle()
        if late is not None:  # a state of the present step makes up for the one that failed
            trainer.logger.error("%s", late)
            self._saved_step = None
        self._save(trainer, background=False)

    def wait_for_writes(self) -> None:
        """Waits for what is being written.

        Raises:
            CheckpointError: it could not be written.
        """
        try:
            self._writer.wait()
        except CheckpointError:
            self._saved_step = None  # a later occasion at the same step tries again
            raise

    def _save(self, trainer: Engine, *, background: bool) -> None:
        self.wait_for_writes()
        if self._saved_step == trainer.step:
            return
        if distributed.rank() != 0:
            trainer.state_dict()  # the ranks' generators are gathered
        else:
            write = self._write_to(trainer)
            self._writer.save(lambda buffers: trainer.state_dict(buffers=buffers), write, background=background)
        self._saved_step = trainer.step

    def _write_to(self, trainer: Engine) -> Callable[[Mapping[str, Any]], None]:
        """Returns what writes a copy of the present state; it asks nothing of the trainer or the hook any more."""
        target = self.folder(trainer) / f"checkpoint_step_{trainer.step}.pt"
        # A clock that was set back makes the newest file look old; it is never the one to go.
        protect = [target] if self._resumed_from is None else [target, self._resumed_from]
        retention = self.retention
        return lambda tree: _write(tree, target, retention, protect)


def _write(tree: Mapping[str, Any], target: Path, retention: Retention, protect: Iterable[Path]) -> None:
    if save_checkpoint(tree, target) != target:
        return  # not finite: put aside, nothing linked, nothing pruned
    point_to(target, _LATEST)
    retention.prune(target.parent, _PATTERN, protect)
