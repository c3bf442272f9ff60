"""Hooks that every front end adds by default: progress display, and files that describe the run."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.engine.hook import BaseHook
from treadle.engine.voice import turned_off
from treadle.faces.run_files import RunFilesHook
from treadle.hooks.bar import ProgressBarHook, RunProgress
from treadle.hooks.progress import ProgressHook


def with_default_hooks(hooks: Sequence[BaseHook], *, given: Sequence[BaseHook], progress: bool) -> list[BaseHook]:
    """Return hooks with the default ones appended.

    Args:
        hooks: all hooks of the run.
        given: hooks given by the user; one that shows progress replaces the default one.
        progress: whether the run shows its progress.

    Example:
        >>> hooks = [ProgressHook(10)]
        >>> [hook.state_key for hook in with_default_hooks(hooks, given=hooks, progress=True)]
        ['ProgressHook', 'RunFilesHook']
    """
    own: list[BaseHook] = [RunFilesHook()]
    if progress and not turned_off() and not shows_progress(given):
        own.append(RunProgress())
    return [*hooks, *own]


def shows_progress(hooks: Sequence[BaseHook]) -> bool:
    """Return whether one of the hooks shows the progress of a run."""
    return any(isinstance(hook, (ProgressHook, ProgressBarHook)) for hook in hooks)
