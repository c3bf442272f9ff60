"""Variables used by the user's functions and classes: of modules, classes, functions and defaults."""

from __future__ import annotations

import ast
import dis
import enum
import functools
import inspect
import itertools
import os
import sys
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from treadle.checkpoint.attributes import CachedFunction, is_fixed, is_table
from treadle.checkpoint.generators import GENERATORS
from treadle.checkpoint.introspection import (
    Named,
    has_state,
    is_empty,
    is_engine_or_trainer,
    is_user_class,
    is_user_object,
    is_users_root,
    names_used_by,
)
from treadle.checkpoint.library_values import is_library_value
from treadle.checkpoint.plain_values import is_plain_object

_INSTALLED = ("site-packages", "dist-packages")  # path components of installed packages
_MOST = 256  # items of a container that are searched for code
_KINDS = (bool, int, float, complex, str, type(None), list, dict, set, deque, np.ndarray, Tensor, *GENERATORS)


class Variables(Named):
    """Variables by name, accessed like attributes of one object.

    Args:
        roots: functions, classes and objects in whose code, and in code that it calls, variables are searched.
        known: names of variables to leave out.

    Attributes:
        stateful: objects with state dicts among them, by name, which are not saved here.

    Example:
        >>> def made(calls={"n": 0}): return calls
        >>> made.__module__ = "mine"; list(Variables([made]).values())
        ['made(calls)']
    """

    def __init__(self, roots: Iterable[Any], *, known: Collection[str] = ()):
        self._known = frozenset(known)
        self._used: dict[str, tuple[dict[str, Any], str]] = {}  # module variables
        self._codes: list[Any] = []
        self._defaults: dict[str, tuple[types.FunctionType, str]] = {}
        self._settings: set[str] = set()  # names of environment variables
        self._cells: dict[str, types.CellType] = {}  # closure variables
        self.stateful: dict[str, Any] = {}
        for code in _reachable(roots):
            self._add(code)

    def _add(self, code: Any) -> None:
        self._codes.append(code)
        for function in _functions_of(code):
            names = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            self._cells |= {f"{function.__qualname__}({name})": cell for name, cell in names if name != "__class__"}
        if isinstance(code, type):
            return
        if {"environ", "getenv", "putenv"}.intersection(names_used_by(code)):
            self._settings |= _texts_in(code)
        for module, variables, name in _variables_named_in(code):
            if not _is_special(name):
                self._used[f"{module}.{name}"] = (variables, name)
                value = variables.get(name)
                if has_state(value) and not is_engine_or_trainer(value):
                    self.stateful[f"{module}.{name}"] = value
        for name, value in _defaults_of(code).items():
            if not is_fixed(value):
                self._defaults[f"{code.__qualname__}({name})"] = code, name

    def uses(self, name: str) -> bool:
        """Return whether the code uses a variable name."""
        functions = (_functions_of(code) for code in self._codes)
        return any(name in names_used_by(function) for found in functions for function in found)

    def sets(self, name: str) -> bool:
        """Return whether the code sets an attribute of this name, or holds the name as a string."""
        functions = {function for code in self._codes for function in _functions_of(code)}
        return any(name in _texts_in(function) or name in _attributes_set_by(function) for function in functions)

    def values(self) -> dict[str, Any]:
        """Return the current variables, including new ones."""
        found = {place: variables[name] for place, (variables, name) in self._used.items() if name in variables}
        for code in self._codes:
            if isinstance(code, enum.EnumMeta):
                continue
            found |= {f"{code.__qualname__}.{name}": value for name, value in vars(code).items()
                      if not _is_special(name)}  # fmt: skip
        found |= {place: _defaults_of(code)[name] for place, (code, name) in self._defaults.items()}
        found |= {f"os.environ[{name!r}]": os.environ[name] for name in self._settings & os.environ.keys()}
        found |= {name: cell.cell_contents for name, cell in self._cells.items() if not is_empty(cell)}
        found |= {f"{name}()": value() for name, value in found.items() if isinstance(value, weakref.ref)}
        return {name: value for name, value in found.items() if _is_variable(value) and name not in self._known}

    def set(self, name: str, value: Any) -> None:
        """Set a variable."""
        if name in self._cells:
            self._cells[name].cell_contents = value
            return
        if name.startswith("os.environ["):
            os.environ[ast.literal_eval(name.removeprefix("os.environ[").removesuffix("]"))] = value
            return
        if name in self._used:
            variables, key = self._used[name]
            variables[key] = value
            return
        if name in self._defaults:
            _set_default(*self._defaults[name], value)
            return
        owner, _, attribute = name.rpartition(".")
        for code in self._codes:
            if code.__qualname__ == owner:
                setattr(code, attribute, value)


def _reachable(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield the functions and classes of the user's code that the roots use, each once."""
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


def _functions_of(code: Any) -> list[types.FunctionType]:
    if isinstance(code, type):
        return [function for value in vars(code).values() if (function := _function_in(value)) is not None]
    return [code]


def _used_by(code: Any) -> list[Any]:
    if isinstance(code, type):
        return [*_functions_of(code), *(inner for value in vars(code).values() for inner in code_behind(value))]
    named = [variables.get(name) for _, variables, name in _variables_named_in(code)]
    named += [cell.cell_contents for cell in code.__closure__ or () if not is_empty(cell)]
    return [inner for value in named for inner in code_behind(value)]


def code_behind(value: Any, depth: int = 2) -> Iterator[Any]:
    """Yield the functions and classes behind a value: itself, its class, and those of what a container holds."""
    if isinstance(value, CachedFunction):
        value = value.__wrapped__
    if isinstance(value, (list, tuple, set, frozenset, deque, dict)) and depth:
        items = value.values() if isinstance(value, dict) else value
        for item in itertools.islice(items, _MOST):
            yield from code_behind(item, depth - 1)
    elif isinstance(value, (type, types.FunctionType, types.MethodType, functools.partial)):
        yield value
    elif is_user_object(value):
        yield type(value)


def _variables_named_in(function: types.FunctionType) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the module, its variables and the name of what a function may name, also through the user's modules."""
    names = dict.fromkeys(names_used_by(function))
    package = function.__globals__.get("__package__") or ""
    imported = (sys.modules.get(path) for name in names for path in (name, f"{package}.{name}"))  # in the function
    waiting: list[tuple[str, dict[str, Any]]] = [(function.__module__, function.__globals__)]
    waiting += [(found.__name__, vars(found)) for found in imported if found is not None and _is_own_module(found)]
    seen = set()
    while waiting:
        module, variables = waiting.pop(0)
        if id(variables) in seen:
            continue
        seen.add(id(variables))
        for name in names:
            if name in variables or variables is function.__globals__:
                yield module, variables, name
            inner: Any = variables.get(name)
            if _is_own_module(inner):
                waiting.append((inner.__name__, vars(inner)))


def _function_in(value: Any) -> types.FunctionType | None:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, (property, functools.cached_property)):
        value = value.fget if isinstance(value, property) else value.func
    value = inspect.unwrap(value) if callable(value) else value
    return value if isinstance(value, types.FunctionType) else None


def _is_own_code(code: Any) -> bool:
    """Return whether a class or function is from a script or a package that is not installed."""
    if not is_user_class(code):
        return False
    path = getattr(sys.modules.get(code.__module__), "__file__", None) or ""
    return not any(part in path for part in _INSTALLED)


def _is_own_module(value: Any) -> bool:
    """Return whether a value is a module of a script or of a package that is not installed."""
    if not isinstance(value, types.ModuleType):
        return False
    root, path = value.__name__.partition(".")[0], getattr(value, "__file__", None) or ""
    return is_users_root(root) and not any(part in path for part in _INSTALLED)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_variable(value: Any) -> bool:
    if isinstance(value, (type, types.ModuleType, types.FunctionType)) or is_engine_or_trainer(value):
        return False
    held = isinstance(value, (*_KINDS, CachedFunction, functools.partial)) or is_library_value(value)
    return held or is_table(value) or is_plain_object(value) or (is_user_object(value) and not has_state(value))


def _attributes_set_by(function: types.FunctionType) -> set[str]:
    return {one.argval for one in dis.get_instructions(function) if one.opname == "STORE_ATTR"}


def _texts_in(function: types.FunctionType) -> set[str]:
    """Return the texts that a function names, such as those of environment variables."""
    found, waiting = set(), list(function.__code__.co_consts)
    while waiting:
        constant = waiting.pop()
        if isinstance(constant, types.CodeType):
            waiting += constant.co_consts
        elif isinstance(constant, str):
            found.add(constant)
    return found


def _defaults_of(function: types.FunctionType) -> dict[str, Any]:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    values = function.__defaults__ or ()
    return dict(zip(names[len(names) - len(values) :], values, strict=True)) | (function.__kwdefaults__ or {})


def _set_default(function: types.FunctionType, name: str, value: Any) -> None:
    of_keywords = function.__kwdefaults__ or {}
    if name in of_keywords:
        of_keywords[name] = value
        return
    values = _defaults_of(function) | {name: value}
    function.__defaults__ = tuple(values[key] for key in values if key not in of_keywords)
