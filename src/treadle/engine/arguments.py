"""Arguments checked against the annotations of the function that takes them."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from datetime import timedelta
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

import numpy as np

from treadle.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    None: ((type(None),), "None"),
    type(None): ((type(None),), "None"),
    bool: ((bool, np.bool_), "True or False"),
    int: ((Integral,), "a whole number"),
    float: ((Real,), "a number"),
    str: ((str,), "a text"),
    Path: ((str, os.PathLike), "a path"),
    os.PathLike: ((str, os.PathLike), "a path"),
    timedelta: ((timedelta,), "a timedelta"),
    Sequence: ((Iterable,), "a list"),
    Collection: ((Iterable,), "a list"),
    Set: ((Iterable,), "a set"),
    list: ((Iterable,), "a list"),
    tuple: ((Iterable,), "a tuple"),
    Mapping: ((Mapping,), "a dict"),
    dict: ((Mapping,), "a dict"),
    Callable: ((Callable,), "a function"),  # type: ignore[dict-item]
}
_LISTS = (Sequence, Collection, list)
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function refuse arguments of other types than it is annotated with, by name.

    Numbers, texts, flags, paths, functions, lists and dicts are checked, and unions of them; other annotations are not.

    Example:
        >>> @checked
        ... def wait(seconds: float, name: str | None = None): ...
        >>> wait("long")
        Traceback (most recent call last):
        treadle.errors.ConfigError: seconds='long': must be a number
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        parameters, hints = _annotated(function)
        given: dict[str, Any] = {**dict(zip(parameters, args)), **kwargs}  # noqa: B905  (fewer may be given)
        for name, value in given.items():
            check_argument(name, value, hints.get(name, Any))
        return function(*args, **kwargs)

    return call


def check_argument(name: str, value: Any, hint: Any) -> None:
    """Raise for a value of another type than an annotation.

    Raises:
        ConfigError: it is of another type.

    Example:
        >>> check_argument("save_dir", "runs", str | Path | None)
    """
    if not any(_fits(value, part) for part in _parts_of(hint)):
        raise ConfigError(f"must be {_in_words(hint)}", argument=name, value=value)


@functools.cache
def _annotated(function: Callable[..., Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the names of the positional parameters of a function, and the annotations that can be read."""
    names = [one.name for one in inspect.signature(function).parameters.values() if one.kind is not one.VAR_POSITIONAL]
    namespace, hints = vars(sys.modules[function.__module__]), {}
    for name, hint in function.__annotations__.items():
        try:
            hints[name] = eval(hint, namespace) if isinstance(hint, str) else hint
        except NameError:  # imported for the type checker alone
            continue
    return names, hints


def _parts_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    kind: Any = get_origin(hint) or hint
    if kind is Literal:
        return isinstance(value, (str, int, type(None))) and value in get_args(hint)
    if not _is_known(hint):
        return True
    wanted, given = _KINDS[kind][0], type(value)
    if issubclass(given, bool) and kind in (int, float):
        return False
    if not issubclass(given, wanted) or (issubclass(given, (str, Mapping)) and Iterable in wanted):
        return False
    items = get_args(hint) if kind in _LISTS and issubclass(given, Collection) else ()
    inside: Any = value
    return all(_fits(item, items[0]) for item in inside) if items else True


def _is_known(hint: Any) -> bool:
    """Return whether the values of an annotation are checked; lists are where their items are."""
    kind = get_origin(hint) or hint
    if kind in _LISTS:
        return all(map(_is_known, get_args(hint)))
    return isinstance(kind, Hashable) and kind in _KINDS


def _in_words(hint: Any) -> str:
    words: list[str] = []
    for part in _parts_of(hint):
        kind = get_origin(part) or part
        if kind is Literal:
            words += map(repr, get_args(part))
        else:
            items = get_args(part) if kind in _LISTS else ()
            words.append(_KINDS[kind][1] + (f" of {_PLURALS.get(items[0], 'items')}" if items else ""))
    if "a text" in words and "a path" in words:
        words.remove("a text")
    return " or ".join(dict.fromkeys(words))
