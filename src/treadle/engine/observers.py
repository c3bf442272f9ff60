"""Observers of every engine in this process, for tools that watch other people's runs.

``treadle verify`` runs a user's script and must see the trainer which that script creates, without a change to the
script. There are no observers unless such a tool registers one around the script; to watch a run of your own, pass a
hook instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


class Observer(Protocol):
    """Observer of an engine, called once at each of two moments."""

    def before_building(self, engine: Engine) -> None:
        """Called when settings are known and nothing is built yet; may move the workspace. BaseTrainer only."""
        ...

    def before_running(self, engine: Engine) -> None:
        """Called when model, optimizer and hooks exist but are not used yet; may add hooks."""
        ...


_observers: list[Observer] = []


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Notify an observer of every engine that is prepared inside the block.

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
    """Notify observers that an engine is about to be built."""
    for observer in _observers:
        observer.before_building(engine)


def announce_running(engine: Engine) -> None:
    """Notify observers that an engine is built."""
    for observer in _observers:
        observer.before_running(engine)


def exchange_observers(observers: list[Observer]) -> list[Observer]:
    """Replace the registered observers and return the previous ones, for runs that take turns in one process.

    Example:
        >>> before = exchange_observers([])
        >>> exchange_observers(before)
        []
    """
    before, _observers[:] = list(_observers), observers
    return before
