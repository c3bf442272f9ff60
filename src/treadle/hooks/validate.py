"""Looking at the hooks that a run is given, before it starts."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from typing import Any

from treadle.engine.hook import BaseHook
from treadle.errors import ConfigError

_log = logging.getLogger("treadle.hooks")
_EVENTS = [name for name in vars(BaseHook) if name.startswith("on_")]


def check_hooks(hooks: Any) -> list[BaseHook]:
    """Returns hooks as a list, and warns of a method that is named almost as an event is: nothing would call it.

    Args:
        hooks: a sequence of hooks.

    Raises:
        ConfigError: it is no list or tuple, or one of its items is no hook.

    Example:
        >>> check_hooks(()) == check_hooks([])
        True
    """
    if not isinstance(hooks, Sequence) or isinstance(hooks, str):
        raise ConfigError(
            f"must be a list of hooks, and this is {_kind(hooks)}; give [hook, ...], or [] for none", argument="hooks"
        )
    for number, hook in enumerate(hooks):
        if not isinstance(hook, BaseHook):
            raise ConfigError(
                f"must be a hook, and this is {_kind(hook)}; make an object of a subclass of BaseHook",
                argument=f"hooks[{number}]",
            )
        _warn_of_misspelt_events(hook)
    return list(hooks)


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


def _warn_of_misspelt_events(hook: BaseHook) -> None:
    for name in dir(type(hook)):
        meant = difflib.get_close_matches(name, _EVENTS, n=1, cutoff=0.8) if name.startswith("on_") else []
        if meant and name not in _EVENTS:
            _log.warning("%s.%s: no event calls it; did you mean %r?", type(hook).__name__, name, meant[0])
