"""SavingHook, the base class of hooks that save at chosen steps, and BackgroundErrorHook for other writers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from treadle import distributed
from treadle.checkpoint.order import StateProgress
from treadle.checkpoint.rank_writer import RankWriter
from treadle.distributed.state_names import clean_name
from treadle.engine.hook import BaseHook
from treadle.errors import CheckpointError

if TYPE_CHECKING:
    from treadle.engine import Engine


class SavingHook(BaseHook):
    """Base class of hooks that save at due steps, at the end of the run and on signals, each state once.

    A subclass defines ``_is_due`` and ``_begin_save``, and builds an exit plan from ``_save_and_leave``.

    Args:
        background: write during training.

    Example:
        >>> class Every(SavingHook):
        ...     def _is_due(self, trainer):
        ...         return True
        ...     def _begin_save(self, trainer, *, background):
        ...         print("step", trainer.step)
        >>> from types import SimpleNamespace
        >>> hook, trainer = Every(background=False), SimpleNamespace(step=3, epoch=0, state=SimpleNamespace(writers=[]))
        >>> hook.save(trainer), hook.save(trainer)
        step 3
        (None, None)
    """

    writes = True

    def __init__(self, *, background: bool):
        self._background = background
        self._writer = RankWriter()
        self._saved: StateProgress | None = None

    def _is_due(self, trainer: Engine) -> bool:
        """Return whether to save the state of the current step."""
        raise NotImplementedError

    def _begin_save(self, trainer: Engine, *, background: bool) -> None:
        """Pass the current state to the writer."""
        raise NotImplementedError

    def on_after_step(self, trainer: Engine) -> None:
        """Request a checkpoint if due; it is written once every hook has seen the step."""
        if self._writer.in_flight and self._writer.ended(trainer.rank_notices(self._writer.notice)):
            trainer.request_write(self.wait_for_writes)
        if self._is_due(trainer):
            trainer.request_write(lambda: self.save(trainer))

    def notice(self, trainer: Engine) -> Callable[[], float]:
        """Send whether this rank is still writing, so that all ranks raise an error at the same step."""
        return self._writer.notice

    def on_after_train(self, trainer: Engine) -> None:
        """Save the final state, including the last epoch, and wait for the background write."""
        trainer.request_write(lambda: self._save_end(trainer))

    def _save_end(self, trainer: Engine) -> None:
        if all(getattr(driver, "record_complete", True) for driver in trainer.state.drivers):
            self.save(trainer)
        self.wait_for_writes()

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Wait for the background write."""
        self._writer.close(error)

    def save(self, trainer: Engine) -> None:
        """Write the current state, once; with ``background=True``, return once the state is copied.

        Raises:
            CheckpointError: this or the previous write failed.
        """
        self._save(trainer, background=self._background)

    def _save_and_leave(self, trainer: Engine) -> None:
        """Write the current state in the foreground, which makes up for an earlier failed write."""
        late = self._writer.wait_for_error()
        if late is not None:
            self._saved = None
        for error in (late, *(writer.wait_for_error() for writer in trainer.state.writers)):
            if error is not None:
                trainer.logger.error("%s", error)
        self._save(trainer, background=False)

    def wait_for_writes(self) -> None:
        """Wait for the background write.

        Raises:
            CheckpointError: the write failed.
        """
        try:
            self._writer.wait()
        except CheckpointError:
            self._saved = None  # a later save at the same step tries again
            raise

    def _save(self, trainer: Engine, *, background: bool) -> None:
        self.wait_for_writes()
        reach = StateProgress(trainer.step, trainer.epoch)
        if self._saved != reach:
            for writer in trainer.state.writers:
                writer.wait()  # else a kill could leave a state with a best epoch whose weights are not on disk
            self._begin_save(trainer, background=background)
            self._saved = reach


def equal_names(trainer: Engine) -> set[str]:
    """Return the names of weights that are equal on all ranks: those that are not sharded."""
    named = distributed.unwrap(trainer.model).named_parameters(remove_duplicate=False)
    return {clean_name(name) for name, parameter in named if not distributed.is_dtensor(parameter)}


class BackgroundErrorHook(BaseHook):
    """Hook that raises the error of a background write once every hook has seen the step in which the write ended.

    Args:
        writer: writes the checkpoints.
    """

    writes = True

    def __init__(self, writer: RankWriter):
        self._writer = writer

    def on_after_step(self, trainer: Engine) -> None:
        """Request the error to be raised, if a write has ended."""
        if self._writer.ended(trainer.rank_notices(self._writer.notice)):
            trainer.request_write(self._writer.wait)

    def steps_ahead(self, trainer: Engine) -> int | None:
        """Allow any number of steps; every step is checked while a checkpoint is being written."""
        return 1 if self._writer.in_flight else None

    def notice(self, trainer: Engine) -> Callable[[], float]:
        """Send whether this rank is still writing."""
        return self._writer.notice

    def wait_for_writes(self) -> None:
        """Wait for the background write."""
        self._writer.wait()
