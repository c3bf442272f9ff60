"""What an engine tells its hooks, and the files that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from treadle.engine.hook import STEP_EVENTS, BaseHook, listeners, reaches_hooks


class Events:
    """The hooks of an engine and what reaches them, in their order.

    Attributes:
        hooks: what watches the run; may be changed at any time.

    Example:
        >>> Events().emit("on_after_step")
    """

    def __init__(self) -> None:
        self.hooks: list[BaseHook] = []
        self.hooks_served = False
        self._listening: dict[str, list[BaseHook]] = {}
        self._listened: list[BaseHook] = []
        self._writes: list[Callable[[], Any]] = []

    def emit(self, event: str, *args: Any) -> None:
        """Calls one event of every hook, in order; in a run's steps, of those that do something at it."""
        if self._listening and self._listened != self.hooks:
            self.listen()  # hooks came or went
        for hook in self._listening.get(event, self.hooks):
            getattr(hook, event)(self, *args)

    def hears(self, event: str) -> list[BaseHook]:
        """Returns the hooks that do something at an event of a step."""
        if self._listening and self._listened == self.hooks:
            return self._listening[event]
        return listeners(self.hooks, event)

    def listen(self) -> None:
        """Finds which hooks do something in a step, so that in each step the others are not called."""
        self._listened = list(self.hooks)
        self._listening = {event: listeners(self._listened, event) for event in STEP_EVENTS}

    def call_all(self) -> None:
        """Ends what :meth:`listen` began: from here on every hook is called, as outside a run."""
        self._listening = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Sees to it that an overridden ``log`` or ``log_images`` serves the hooks, with or without ``super()``."""
        super().__init_subclass__(**kwargs)
        for name in ("log", "log_images"):
            if name in cls.__dict__:
                setattr(cls, name, reaches_hooks(cls.__dict__[name], f"on_{name}"))

    def log(self, records: Mapping[str, Any], dry_run: bool = False) -> None:
        """Hands aggregated records to ``on_log`` of every hook; may be overridden, with or without ``super()``."""
        self.hooks_served = True
        self.emit("on_log", records, dry_run)

    def log_images(self, records: Mapping[str, Any], dry_run: bool = False) -> None:
        """Hands nested images to ``on_log_images`` of every hook; may be overridden as ``log`` may."""
        self.hooks_served = True
        self.emit("on_log_images", records, dry_run)

    def request_write(self, write: Callable[[], Any]) -> None:
        """Asks for a file to be written once every hook has seen the step, so that hook order cannot matter."""
        self._writes.append(write)

    def write_requested(self) -> None:
        """Writes what was asked for."""
        if not self._writes:
            return
        writes, self._writes = self._writes, []
        for write in writes:
            write()
