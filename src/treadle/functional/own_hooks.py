"""Hooks that Trainer adds by its settings."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from treadle.engine.hook import BaseHook
from treadle.engine.signals import ExitPlan
from treadle.functional.settings import TrainingSettings
from treadle.hooks.ema import EmaHook

if TYPE_CHECKING:
    from treadle.engine import Engine

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SaveAtSignals(BaseHook):
    """Hook that saves and exits on Ctrl-C and SIGTERM, by default if a run has a folder.

    It is inactive if a hook or handler of the user handles signals, and outside the main thread, where Python handles
    none.

    Args:
        write: saves the state.
    """

    writes = True
    implicit = True

    def __init__(self, write: Callable[[], Any]):
        self._write = write

    def exit_plan(self, trainer: Engine) -> ExitPlan | None:
        """Return the plan, or None if there is no folder or another handler is in charge."""
        if trainer.workspace is None or threading.current_thread() is not threading.main_thread():
            return None
        if any(hook is not self and hook.exit_plan(trainer) is not None for hook in trainer.hooks):
            return None
        free = [number for number in _SIGNALS if _is_free(signal.getsignal(number), trainer)]
        return ExitPlan(tuple(free), self._write) if free else None


_DEFAULT = (signal.SIG_DFL, signal.default_int_handler)


def _is_free(handler: Any, trainer: Engine) -> bool:
    """Return whether a handler is Python's default, or this trainer's, around the runs of single epochs."""
    return handler in _DEFAULT or getattr(handler, "__self__", None) is trainer.signals


def own_hooks(settings: TrainingSettings, history: BaseHook, write: Callable[[], Any]) -> list[BaseHook]:
    """Return the hooks for averaging, history and saving on signals, according to the settings.

    Args:
        settings: settings of the trainer.
        history: hook that writes the history.
        write: saves the state on a signal.

    Example:
        >>> [hook.state_key for hook in own_hooks(TrainingSettings(ema_decay=0.9), BaseHook(), lambda: None)]
        ['EmaHook', 'BaseHook', 'SaveAtSignals']
    """
    own: list[BaseHook] = [] if settings.ema_decay is None else [EmaHook(settings.ema_decay)]
    own.append(history)
    if settings.save_on_signal:
        own.append(SaveAtSignals(write))
    return own
