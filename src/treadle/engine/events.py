"""Dispatch of events to hooks, and writing of the files that hooks request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treadle.engine.evaluation import EvaluationAbandoned
from treadle.engine.hook import STEP_EVENTS, BaseHook, listeners
from treadle.errors import ConfigError

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


class Events:
    """Dispatcher of an engine's events to its hooks, in order.

    Attributes:
        served: whether the hooks have received the records of the latest call of ``log`` or ``log_images``.
        abandoned: whether a signal ended an evaluation run by a hook; all ranks know, and the run exits at the next
            boundary.
        held: whether files and exits wait for the code that follows a step in the user's own loop.

    Example:
        >>> Events().hooks_for([BaseHook()], "on_after_step")
        []
    """

    def __init__(self) -> None:
        self.served = False
        self.abandoned = False
        self.held = self._step_waits = False
        self._listening: dict[str, list[BaseHook]] = {}
        self._listened: list[BaseHook] = []
        self._writes: list[Callable[[], Any]] = []

    def begin(self) -> None:
        """Forget an evaluation that was abandoned in an earlier run."""
        self.abandoned = False

    def emit(self, engine: Engine, event: str, *args: Any) -> None:
        """Call one event of every hook, in order; within steps, only of hooks that override it."""
        hooks = engine.hooks
        if self._listening and self._listened != hooks:
            self.cache_dispatch(hooks)  # hooks were added or removed
        for hook in self._listening.get(event, hooks):
            try:
                getattr(hook, event)(engine, *args)
            except EvaluationAbandoned:  # the other hooks see the event: their state is saved too
                self.abandoned = True

    def hooks_for(self, hooks: Sequence[BaseHook], event: str) -> list[BaseHook]:
        """Return the hooks that override an event of a step."""
        if self._listening and self._listened == hooks:
            return self._listening[event]
        return listeners(hooks, event)

    def cache_dispatch(self, hooks: Sequence[BaseHook]) -> None:
        """Cache which hooks override events of a step, so that the others are not called in each step."""
        self._listened = list(hooks)
        self._listening = {event: listeners(self._listened, event) for event in STEP_EVENTS}

    def clear_dispatch(self) -> None:
        """Drop the cache of :meth:`cache_dispatch`: from now on every hook is called, as outside a run."""
        self._listening = {}

    def serve(self, engine: Engine, event: str, records: Mapping[str, Any], *, dry_run: bool) -> None:
        """Call ``on_log`` or ``on_log_images`` of every hook, and mark the records as served.

        Raises:
            ConfigError: the records are no dict.
        """
        if not isinstance(records, Mapping):
            raise ConfigError("must be a dict, such as {'val': {'loss': 0.5}}", argument="records", value=records)
        self.served = True
        self.emit(engine, event, records, dry_run)

    def call_override(self, engine: Engine, event: str, override: Callable[[], Any], *args: Any) -> None:
        """Call a user's override of ``log`` or ``log_images``, then the hooks if the override did not reach them."""
        self.served = False
        override()
        if not self.served:
            self.served = True
            self.emit(engine, event, *args)

    def request_write(self, write: Callable[[], Any]) -> None:
        """Request a file to be written once every hook has seen the step, so that hook order cannot matter."""
        self._writes.append(write)

    def hold(self) -> None:
        """Let files and exits wait for the user's code that follows a step."""
        self.held = True

    def hold_exit(self) -> None:
        """Record that a step has ended whose exit is held."""
        self._step_waits = True

    def release(self) -> bool:
        """Hold files and exits no longer; return whether a step has ended in between, whose exit is now due."""
        waits, self.held, self._step_waits = self._step_waits, False, False
        return waits

    def write_requested(self) -> None:
        """Write the requested files, unless they are held."""
        if self.held or not self._writes:
            return
        writes, self._writes = self._writes, []
        for write in writes:
            try:
                write()
            except EvaluationAbandoned:
                self.abandoned = True
