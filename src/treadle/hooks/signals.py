"""SignalHook: saves and exits on signals."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from treadle.engine.hook import BaseHook
from treadle.engine.signals import ExitCode, ExitPlan, exit_plan
from treadle.errors.arguments import checked

if TYPE_CHECKING:
    from treadle.engine import Engine


class SignalHook(BaseHook):
    """Hook that saves at the next step boundary after a signal, and exits with 128 + its number.

    Args:
        write: saves the state.
        exit_signals: one or several signals; by default SIGTERM and SIGINT.
        exit_code: ``"128+signal"`` or a number.
        exit_wait: seconds or a timedelta to sleep between saving and exiting.

    Raises:
        ConfigError: a signal cannot be handled or ``exit_code`` is another string.

    Example:
        >>> hook = SignalHook(lambda: None, exit_signals=signal.SIGTERM)
    """

    writes = True

    @checked
    def __init__(
        self,
        write: Callable[[], Any],
        exit_signals: int | Sequence[int] = (signal.SIGTERM, signal.SIGINT),
        *,
        exit_code: ExitCode = "128+signal",
        exit_wait: float | timedelta = 0.0,
    ):
        self._plan = exit_plan(exit_signals, write, code=exit_code, wait=exit_wait)

    def exit_plan(self, trainer: Engine) -> ExitPlan | None:
        """Return the exit plan."""
        return self._plan
