"""Checks of arguments against the annotations of a function."""

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
from typing import Any, Literal, TypeGuard, TypeVar, Union, get_args, get_origin

from treadle.errors import ConfigError, nearest

Target = TypeVar("Target", bound=Callable[..., Any])
_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    None: ((type(None),), "None"),
    type(None): ((type(None),), "None"),
    bool: ((bool,), "True or False"),
    int: ((Integral,), "a whole number"),
    float: ((Real,), "a number"),
    str: ((str,), "a string"),
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
_SHAPES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "Module": (("named_parameters", "named_modules"), (), "a torch.nn.Module"),
    "Optimizer": (("step", "zero_grad", "param_groups"), (), "an optimizer, such as torch.optim.AdamW(...)"),
    "LRScheduler": (("step",), ("zero_grad",), "a scheduler of torch.optim.lr_scheduler"),
    "Tensor": (("dtype", "shape", "numel"), (), "a tensor"),
    "Logger": (("info", "warning", "log"), (), "a logging.Logger"),
    "Generator": (("manual_seed", "get_state"), (), "a torch.Generator"),
    "Engine": (("state_parts", "prepare"), (), "a treadle.Engine"),
    "BestRule": (("update", "value_in"), (), "a treadle.BestRule"),
    "EarlyStopping": (("state_dict", "best"), (), "a treadle.EarlyStopping"),
    "Task": (("step",), ("param_groups",), "a task, an object with step(model, batch)"),
    "device": ((), (), "a device, such as 'cuda:0'"),
    "Iterable": ((), (), "an iterable, such as a DataLoader or a list"),
}
"""Attributes that an object of a class has, those that it has not, and words for it."""
_HOMES = ("torch", "treadle", "logging", "collections")
_LISTS = (Sequence, Collection, list)
_PLURALS = {int: "whole numbers", float: "numbers", str: "strings"}


def checked(target: Target) -> Target:
    """Decorate a function or constructor to raise for arguments whose types differ from their annotations.

    Numbers, strings, bools, paths, functions, lists, dicts, some classes of torch and this library, and unions of them
    are checked; other annotations are not.

    Example:
        >>> @checked
        ... def wait(seconds: float, name: str | None = None): ...
        >>> wait("long")
        Traceback (most recent call last):
        treadle.errors.ConfigError: seconds='long': must be a number
    """
    if isinstance(target, type):
        target.__init__ = _checked_call(target.__init__, skipped=1, module=target.__module__)  # type: ignore[misc]
        return target
    return _checked_call(target, skipped=0, module=target.__module__)  # type: ignore[return-value]


def suggesting(function: Target) -> Target:
    """Decorate a function to suggest the closest name for an argument that it does not have.

    Example:
        >>> @suggesting
        ... def train(*, num_epochs=1): ...
        >>> train(epochs=2)
        Traceback (most recent call last):
        TypeError: train() got an unexpected argument 'epochs'; did you mean 'num_epochs'?
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _refuse_unknown_arguments(function, kwargs, _annotated(function, function.__module__)[1])
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def _refuse_unknown_arguments(function: Callable[..., Any], given: Iterable[str], keywords: Set[str]) -> None:
    for name in given if keywords else ():
        if name not in keywords:
            raise TypeError(f"{function.__qualname__}() got an unexpected argument {name!r}; {nearest(name, keywords)}")


def _checked_call(function: Callable[..., Any], *, skipped: int, module: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        parameters, keywords, hints = _annotated(function, module)
        _refuse_unknown_arguments(function, kwargs, keywords)
        given: dict[str, Any] = {**dict(zip(parameters[skipped:], args[skipped:])), **kwargs}  # noqa: B905  (fewer may be given)
        for name, value in given.items():
            check_argument(name, value, hints.get(name, Any))
        return function(*args, **kwargs)

    return call


def check_argument(name: str, value: Any, hint: Any) -> None:
    """Raise for a value that does not match an annotation.

    Raises:
        ConfigError: the type differs.

    Example:
        >>> check_argument("save_dir", "runs", str | Path | None)
    """
    if not any(_fits(value, part) for part in _parts_of(hint)):
        raise ConfigError(f"must be {_described(hint)}{_hint(value, hint)}", argument=name, value=value)
    if Path in _parts_of(hint) and isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        if text == "":
            raise ConfigError("must not be empty; write '.' for the current folder", argument=name, value=value)
        if isinstance(text, str) and text.startswith("~"):
            raise ConfigError(
                "only a shell expands '~'; pass pathlib.Path(...).expanduser()", argument=name, value=value
            )


def check_fields(values: Any, section: str) -> None:
    """Raise for a field of a dataclass that does not match its annotation; None passes.

    Args:
        values: the instance.
        section: prefix of the names in messages.

    Raises:
        ConfigError: the type of a field differs.
    """
    for name, hint in _annotated(type(values).__init__, type(values).__module__)[2].items():
        if (value := getattr(values, name, None)) is not None:
            check_argument(f"{section}.{name}", value, hint)


def check_least(least: float, **values: float | None) -> None:
    """Raise for a number below a bound; None passes.

    Args:
        least: the smallest value that is allowed.
        values: by argument; two underscores are a dot.

    Raises:
        ConfigError: a value is outside its range.

    Example:
        >>> check_least(1, d_model=8, data__max_topics=None)
    """
    for name, value in values.items():
        if value is not None and not value >= least:
            raise _out_of_range(f"must be at least {least:g}", name, value)


def check_above(bound: float, **values: float | None) -> None:
    """Raise for a number that is not above a bound; None passes, and names are as in :func:`check_least`."""
    for name, value in values.items():
        if value is not None and not value > bound:
            raise _out_of_range(f"must be above {bound:g}", name, value)


def check_within(interval: str, **values: float | None) -> None:
    """Raise for a number outside of an interval; None passes, and names are as in :func:`check_least`.

    Args:
        interval: such as ``"[0, 1)"``, the 1 excluded.
        values: by argument.

    Raises:
        ConfigError: one of the values is out of range.

    Example:
        >>> check_within("[0, 1)", dropout=0.0, model__dropout=0.1)
    """
    low, high = map(float, interval[1:-1].split(","))
    for name, value in values.items():
        if value is None:
            continue
        reaches = value >= low if interval[0] == "[" else value > low
        if not (reaches and (value <= high if interval[-1] == "]" else value < high)):
            raise _out_of_range(f"must lie in {interval}", name, value)


def is_whole_number(value: Any, least: int) -> TypeGuard[int]:
    """Return whether a value is an integer of at least ``least``, and no bool.

    Example:
        >>> is_whole_number(1, 1), is_whole_number(True, 1), is_whole_number(1.0, 1)
        (True, False, False)
    """
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def check_whole(least: int, **values: Any) -> None:
    """Raise for anything but a whole number of at least ``least``; names are as in :func:`check_least`."""
    for name, value in values.items():
        if not is_whole_number(value, least):
            raise _out_of_range(f"must be a whole number >= {least}", name, value)


def _out_of_range(rule: str, name: str, value: Any) -> ConfigError:
    return ConfigError(rule, argument=name.replace("__", "."), value=value)


@functools.cache
def _annotated(function: Callable[..., Any], module: str) -> tuple[list[str], frozenset[str], dict[str, Any]]:
    """Return a function's positional parameters, its keywords if they are fixed, and its resolvable annotations."""
    parameters = inspect.signature(function).parameters.values()
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    keywords = frozenset(one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        keywords = frozenset()
    namespace, hints = vars(sys.modules[module]), {}
    for name, hint in function.__annotations__.items():
        try:
            hints[name] = eval(hint, namespace) if isinstance(hint, str) else hint
        except (NameError, TypeError):  # a name is imported for type checking only
            continue
    return names, keywords - {"self"}, hints


def _parts_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    kind: Any = get_origin(hint) or hint
    if kind is Literal:
        return isinstance(value, (str, int, type(None))) and value in get_args(hint)
    if (shape := _shape_of(kind)) is not None:
        look = _LOOKS.get(kind.__name__)
        return _has_shape(value, *shape[:2]) if look is None else look(value)
    if not _is_known(hint):
        return True
    wanted, given = _KINDS[kind][0], type(value)
    if kind is bool and "numpy" in sys.modules and issubclass(given, sys.modules["numpy"].bool_):
        return True
    if issubclass(given, bool) and kind in (int, float):
        return False
    if not issubclass(given, wanted) or (issubclass(given, (str, Mapping)) and Iterable in wanted):
        return False
    items = get_args(hint) if kind in _LISTS and issubclass(given, Collection) else ()
    inside: Any = value
    return all(_fits(item, items[0]) for item in inside) if items else True


def _shape_of(kind: Any) -> tuple[tuple[str, ...], tuple[str, ...], str] | None:
    """Return attributes that objects of a class have and lack; None for classes checked otherwise."""
    if not isinstance(kind, type) or kind.__module__.split(".")[0] not in _HOMES or kind in _KINDS:
        return None
    return next((_SHAPES[one.__name__] for one in kind.__mro__ if one.__name__ in _SHAPES), None)


def _has_shape(value: Any, found: tuple[str, ...], absent: tuple[str, ...]) -> bool:
    if isinstance(value, type):
        return False
    return all(hasattr(value, name) for name in found) and not any(hasattr(value, name) for name in absent)


def _yields_items(value: Any) -> bool:
    kind = type(value)
    iterable = hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")
    return iterable and not issubclass(kind, (bytes, type))


def _is_device(value: Any) -> bool:
    return (isinstance(value, (str, Integral)) and not isinstance(value, bool)) or type(value).__name__ == "device"


_LOOKS: dict[str, Callable[[Any], bool]] = {"Iterable": _yields_items, "device": _is_device}


def _is_known(hint: Any) -> bool:
    """Return whether an annotation is checked; lists are if their items are."""
    kind = get_origin(hint) or hint
    if kind in _LISTS:
        return all(map(_is_known, get_args(hint)))
    return isinstance(kind, Hashable) and (kind in _KINDS or _shape_of(kind) is not None)


def _hint(value: Any, hint: Any) -> str:
    words = [word for part in _parts_of(hint) if get_origin(part) is Literal for word in get_args(part)]
    close = nearest(value, words) if isinstance(value, str) and all(isinstance(word, str) for word in words) else ""
    return f"; {close}" if close.startswith("did you mean") else ""


def _described(hint: Any) -> str:
    words: list[str] = []
    for part in _parts_of(hint):
        kind = get_origin(part) or part
        if kind is Literal:
            words += map(repr, get_args(part))
        elif (shape := _shape_of(kind)) is not None:
            words.append(shape[2])
        else:
            items = get_args(part) if kind in _LISTS else ()
            words.append(_KINDS[kind][1] + (f" of {_PLURALS.get(items[0], 'items')}" if items else ""))
    if "a string" in words and "a path" in words:
        words.remove("a string")
    return " or ".join(dict.fromkeys(words))
