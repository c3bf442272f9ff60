"""The hooks that the functional face adds by its settings."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.engine.hook import BaseHook
from treadle.functional.settings import TrainingSettings
from treadle.hooks.bar import ProgressBarHook
from treadle.hooks.ema import EmaHook
from treadle.hooks.progress import ProgressHook


def own_hooks(settings: TrainingSettings, history: BaseHook, *, given: Sequence[BaseHook]) -> list[BaseHook]:
    """Returns the average, the history and the log lines; no lines where a hook of the user's shows progress.

    Args:
        settings: say which.
        history: writes the history.
        given: the user's hooks.

    Example:
        >>> [hook.state_key for hook in own_hooks(TrainingSettings(ema_decay=0.9), BaseHook(), given=[])]
        ['EmaHook', 'BaseHook', 'ProgressHook']
    """
    own: list[BaseHook] = [] if settings.ema_decay is None else [EmaHook(settings.ema_decay)]
    own.append(history)
    if settings.log_interval and not any(isinstance(hook, (ProgressHook, ProgressBarHook)) for hook in given):
        own.append(ProgressHook(settings.log_interval))
    return own
