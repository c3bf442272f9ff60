"""Origin of a run: the step and epoch at which it began, and states of earlier runs beyond them in its folders."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from treadle.checkpoint.order import StateProgress, move_aside_beyond
from treadle.checkpoint.ranks import on_rank_0

States = Callable[[Path], Iterable[Path]]


class _WatchedFolder(NamedTuple):
    """Folder used by one of the run's writers, with the function that lists its states."""

    folder: Path
    states: States


class RunOrigin:
    """Start of a run, which separates its states in its folders from those of earlier runs.

    Attributes:
        reach: step and epoch of the state that was loaded; those of a fresh run are 0.
        source: the checkpoint that was loaded, for messages.

    Example:
        >>> RunOrigin().reach
        StateProgress(step=0, epoch=0)
    """

    def __init__(self) -> None:
        self.reach = StateProgress()
        self.source: str | None = None
        self._watched: list[_WatchedFolder] = []
        self._cleared: set[_WatchedFolder] = set()

    def moved(self, reach: StateProgress) -> None:
        """Set the origin to a loaded state."""
        self.reach = reach
        self._cleared = set()

    def watch(self, folder: Path, states: States) -> None:
        """Register a folder that the run writes states to.

        Args:
            folder: the folder; need not exist yet.
            states: lists the states that a run resuming from the folder would consider.
        """
        entry = _WatchedFolder(folder, states)
        if entry not in self._watched:
            self._watched.append(entry)

    def clear(self) -> None:
        """Move aside states of earlier runs beyond the origin, in every folder, before the run's first write.

        Else the next resume would take one of them as the furthest state of this run. Collective.

        Raises:
            CheckpointError: one of them cannot be renamed.
        """
        for entry in self._watched:
            if entry in self._cleared:
                continue
            on_rank_0(partial(self._clear, entry))
            self._cleared.add(entry)

    def _clear(self, entry: _WatchedFolder) -> None:
        move_aside_beyond(entry.states(entry.folder), self.reach, source=self.source)
