"""BackgroundErrorHook: what a background write met is raised at the next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from treadle.checkpoint.rank_writer import RankWriter
from treadle.engine.hook import BaseHook

if TYPE_CHECKING:
    from treadle.engine import Engine


class BackgroundErrorHook(BaseHook):
    """Hook that raises the error of a background write once every hook has seen the step in which it ended.

    Args:
        writer: writes the checkpoints.

    Example:
        >>> hook = BackgroundErrorHook(RankWriter())
    """

    writes = True

    def __init__(self, writer: RankWriter):
        self._writer = writer

    def on_after_step(self, trainer: Engine) -> None:
        """Ask for the error, if a write has ended."""
        if self._writer.ended(trainer.rank_notices(self._writer.notice)):
            trainer.request_write(self._writer.wait)

    def steps_ahead(self, trainer: Engine) -> int | None:
        """Let any number of steps run; while a checkpoint is being written, each is looked at."""
        return 1 if self._writer.in_flight else None

    def notice(self, trainer: Engine) -> Callable[[], float]:
        """Tell the other ranks whether this one still writes."""
        return self._writer.notice

    def wait_for_writes(self) -> None:
        """Wait for the background write."""
        self._writer.wait()
