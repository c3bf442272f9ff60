"""BackgroundErrorHook: what a background write met is raised at the next step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.checkpoint.writer import CheckpointWriter
from treadle.hooks.base import BaseHook

if TYPE_CHECKING:
    from treadle.engine import Engine


class BackgroundErrorHook(BaseHook):
    """Looks after each step whether a write has ended, and raises its error once every hook has seen the step.

    Args:
        writer: writes the checkpoints.

    Example:
        >>> hook = BackgroundErrorHook(CheckpointWriter())
    """

    def __init__(self, writer: CheckpointWriter):
        self._writer = writer

    def on_after_step(self, trainer: Engine) -> None:
        """Asks for the error, if a write has ended."""
        if self._writer.landed:
            trainer.request_write(self._writer.wait)

    def wait_for_writes(self) -> None:
        """Waits for what is being written."""
        self._writer.wait()
