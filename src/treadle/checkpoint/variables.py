"""Variables that the user's functions and classes use and no object holds: of modules, classes, functions, defaults."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from treadle.checkpoint.introspection import Named, is_users_class, names_used_by
from treadle.checkpoint.plain_values import GENERATORS, is_plain_object

_INSTALLED = ("site-packages", "dist-packages")  # parts of paths below which nobody's own code is
_KINDS = (bool, int, float, complex, str, type(None), list, dict, set, deque, np.ndarray, Tensor, *GENERATORS)
_Place = tuple[Callable[[], Any], Callable[[Any], None]]


class Variables(Named):
    """Variables by name, as if they were the attributes of one object.

    Args:
        roots: functions, classes and objects from whose code they are found, through what that code calls.

    Example:
        >>> def made(calls={"n": 0}): return calls
        >>> made.__module__ = "__main__"; list(Variables([made]).values())
        ['made(calls)']
    """

    def __init__(self, roots: Iterable[Any]):
        self._places: dict[str, _Place] = {}
        self.stateful: dict[str, Any] = {}
        for code in _reachable(roots):
            self._add(code)

    def _add(self, code: Any) -> None:
        if isinstance(code, type):
            for name, value in vars(code).items():
                if not name.startswith("__") and _is_variable(value):
                    self._places[f"{code.__qualname__}.{name}"] = (
                        functools.partial(getattr, code, name), functools.partial(setattr, code, name),
                    )  # fmt: skip
            return
        for name in dict.fromkeys(names_used_by(code)):
            if name in code.__globals__ and not name.startswith("__"):
                self._add_global(code, name)
        for name, value in vars(code).items():
            if not name.startswith("__") and _is_variable(value):
                self._places[f"{code.__qualname__}.{name}"] = (
                    functools.partial(getattr, code, name), functools.partial(setattr, code, name),
                )  # fmt: skip
        for name, value in _defaults_of(code):
            if isinstance(value, (list, dict, set, deque, *GENERATORS)) or is_plain_object(value):
                self._places[f"{code.__qualname__}({name})"] = functools.partial(_same, value), _keep

    def _add_global(self, code: types.FunctionType, name: str) -> None:
        value, place = code.__globals__[name], f"{code.__module__}.{name}"
        if _is_variable(value):
            variables = code.__globals__
            self._places[place] = (
                functools.partial(variables.get, name), functools.partial(variables.__setitem__, name),
            )  # fmt: skip
        elif callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
            self.stateful[place] = value

    def values(self) -> dict[str, Any]:
        """Returns the variables as they are now."""
        return {name: read() for name, (read, _) in self._places.items()}

    def set(self, name: str, value: Any) -> None:
        """Sets one of them."""
        if name in self._places:
            self._places[name][1](value)


def _same(value: Any) -> Any:
    return value


def _keep(value: Any) -> None:
    """Leaves a default as it is: it was filled in place when it was decoded."""


def _reachable(roots: Iterable[Any]) -> Iterator[Any]:
    """Yields the functions and classes of the user's own code that roots use, each once."""
    waiting, seen = list(roots), set()
    while waiting:
        code = waiting.pop()
        if isinstance(code, types.MethodType):
            waiting += [code.__func__, code.__self__]
            continue
        if isinstance(code, functools.partial):
            waiting += [code.func, *code.args, *code.keywords.values()]
            continue
        if not isinstance(code, (type, types.FunctionType)):
            code = type(code)
        if isinstance(code, type):
            kinds = [kind for kind in code.__mro__ if kind not in seen and _is_own_code(kind)]
        else:
            kinds = [code] if code not in seen and _is_own_code(code) else []
        for kind in kinds:
            seen.add(kind)
            yield kind
            waiting += _used_by(kind)


def _used_by(code: Any) -> list[Any]:
    if isinstance(code, type):
        return [function for value in vars(code).values() if (function := _function_in(value)) is not None]
    named = (code.__globals__.get(name) for name in dict.fromkeys(names_used_by(code)))
    return [value for value in named if isinstance(value, (type, types.FunctionType))]


def _function_in(value: Any) -> types.FunctionType | None:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, (property, functools.cached_property)):
        value = value.fget if isinstance(value, property) else value.func
    value = inspect.unwrap(value) if callable(value) else value
    return value if isinstance(value, types.FunctionType) else None


def _is_own_code(code: Any) -> bool:
    """Returns whether a class or function is of a script or a package that is not installed."""
    if not is_users_class(code):
        return False
    path = getattr(sys.modules.get(code.__module__), "__file__", None) or ""
    return not any(part in path for part in _INSTALLED)


def _is_variable(value: Any) -> bool:
    return isinstance(value, _KINDS) or is_plain_object(value)


def _defaults_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    values = function.__defaults__ or ()
    yield from zip(names[len(names) - len(values) :], values, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
