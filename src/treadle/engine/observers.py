"""Observers of every engine of this process, for tools that watch runs they did not write.

``treadle verify`` runs a user's own script and must see the trainer which that script makes, without a line of the
script being changed. There are none unless such a tool registers one around the script; to watch a run of your own,
pass a hook instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


class Observer(Protocol):
    """Observer of an engine, called at two moments, each once."""

    def before_building(self, engine: Engine) -> None:
        """The settings are known and nothing is built yet; the workspace may be moved. Step face only."""
        ...

    def before_running(self, engine: Engine) -> None:
        """Model, optimizer and hooks exist and nothing was asked of them; hooks may be added."""
        ...


_observers: list[Observer] = []


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell an observer of every engine that is prepared inside the block.

    Example:
        >>> class Count:
        ...     engines = 0
        ...     def before_building(self, engine): ...
        ...     def before_running(self, engine):
        ...         self.engines += 1
        >>> count = Count()
        >>> with observing(count):
        ...     announce_running(engine=None)
        >>> count.engines
        1
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def announce_building(engine: Engine) -> None:
    """Say that an engine is about to be built."""
    for observer in _observers:
        observer.before_building(engine)


def announce_running(engine: Engine) -> None:
    """Say that an engine is built."""
    for observer in _observers:
        observer.before_running(engine)


def exchange_observers(observers: list[Observer]) -> list[Observer]:
    """Replace the registered observers; return those before, for runs that take turns in one process.

    Example:
        >>> before = exchange_observers([])
        >>> exchange_observers(before)
        []
    """
    before, _observers[:] = list(_observers), observers
    return before
