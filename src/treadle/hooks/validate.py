"""Checks of a run's hooks before it starts."""

from __future__ import annotations

import difflib
import inspect
import logging
import types
from collections.abc import Sequence
from typing import Any

from treadle.engine.hook import BaseHook
from treadle.engine.names import names_used_in, takes
from treadle.errors import ConfigError

_log = logging.getLogger("treadle.hooks")
_EVENTS = [name for name in vars(BaseHook) if name.startswith("on_")]


def check_hooks(hooks: Any, *, warns: bool = True) -> list[BaseHook]:
    """Return hooks as a list, and warn about methods with misspelt event names, which nothing would call.

    Args:
        hooks: a sequence of hooks.
        warns: False leaves the warning to a later look at the same hooks.

    Raises:
        ConfigError: it is not a list or tuple, or an item is not a hook.

    Example:
        >>> check_hooks(()) == check_hooks([])
        True
    """
    if not isinstance(hooks, Sequence) or isinstance(hooks, str):
        raise ConfigError(
            f"must be a list of hooks, but this is {_kind(hooks)}; give [hook, ...], or [] for none", argument="hooks"
        )
    for number, hook in enumerate(hooks):
        if not isinstance(hook, BaseHook):
            raise ConfigError(
                f"must be a hook, but this is {_kind(hook)}; pass an instance of a subclass of BaseHook",
                argument=f"hooks[{number}]",
            )
        _refuse_uncallable_events(hook)
        if warns:
            _warn_of_misspelt_events(hook)
    return list(hooks)


def _refuse_uncallable_events(hook: BaseHook) -> None:
    """Raise ConfigError for an event method that would fail when called, or never run its code."""
    for event in _EVENTS:
        method = getattr(hook, event)
        where = f"{type(hook).__name__}.{event}"
        parameters = list(inspect.signature(getattr(BaseHook, event)).parameters)[1:]
        call = f"{event}({', '.join(parameters)})"
        if not callable(method):
            raise ConfigError(f"{where}={method!r}: is not a method; define {event}(self, {', '.join(parameters)})")
        if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
            kind = "an async function" if inspect.iscoroutinefunction(method) else "a generator function"
            raise ConfigError(f"{where}: is {kind}, so calling it does not run its body; make it a plain function")
        if not takes(method, len(parameters)):
            raise ConfigError(f"{where}{inspect.signature(method)}: is called as {call}; accept these arguments")


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


def _warn_of_misspelt_events(hook: BaseHook) -> None:
    kind = type(hook)
    own = [owner for owner in kind.__mro__ if issubclass(owner, BaseHook) and owner.__module__ != BaseHook.__module__]
    used = {name for owner in own for name in names_used_in(owner)}
    on_it = {name for name, value in vars(hook).items() if isinstance(value, types.FunctionType)}
    for name in ({name for owner in own for name in vars(owner)} | on_it) - set(vars(BaseHook)) - used:
        meant = difflib.get_close_matches(name, _EVENTS, n=1, cutoff=0.8)
        if not meant and name.startswith(("before_", "after_")):
            meant = [event for event in _EVENTS if event == f"on_{name}"]
        if meant:
            _log.warning("%s.%s: no event calls it; did you mean %r?", kind.__name__, name, meant[0])
        elif name.startswith("on_") and callable(getattr(hook, name)):
            _log.warning("%s.%s: no event calls it; the events are %s", kind.__name__, name, ", ".join(_EVENTS))
