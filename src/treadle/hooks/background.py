"""BackgroundErrorHook: raises errors of background writes at the next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from treadle.checkpoint.rank_writer import RankWriter
from treadle.engine.hook import BaseHook

if TYPE_CHECKING:
    from treadle.engine import Engine


class BackgroundErrorHook(BaseHook):
    """Hook that raises the error of a background write once every hook has seen the step in which the write ended.

    Args:
        writer: writes the checkpoints.

    Example:
        >>> hook = BackgroundErrorHook(RankWriter())
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
