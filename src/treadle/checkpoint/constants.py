"""Plain-tree encoding of values other than numbers and containers: enums, dates, dtypes, records, objects."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from treadle.errors import CheckpointError

_AS_TEXT: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: ("bytes", bytes.hex, bytes.fromhex),
    complex: ("complex", lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    torch.dtype: ("dtype", lambda value: str(value).removeprefix("torch."), lambda name: getattr(torch, name)),
    torch.device: ("torch_device", str, torch.device),
    torch.Size: ("size", list, torch.Size),
    datetime.datetime: ("datetime", datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: ("date", datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.timedelta: (
        "timedelta", lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    decimal.Decimal: ("decimal", str, decimal.Decimal),
    fractions.Fraction: ("fraction", str, fractions.Fraction),
    range: ("range", lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
}  # fmt: skip
_FROM_TEXT = {name: back for name, _, back in _AS_TEXT.values()}


def encode_constant(value: Any) -> Any:
    """Return an immutable value as a tree with one key, or None if its type is not supported.

    Example:
        >>> encode_constant(torch.float16), encode_constant(b"a"), encode_constant(print)
        ({'dtype': 'float16'}, {'bytes': '61'}, None)
    """
    known = _AS_TEXT.get(type(value))
    if known is not None:
        name, as_plain, _ = known
        return {name: as_plain(value)}
    if isinstance(value, PurePath):
        return {"path": str(value)}
    if isinstance(value, np.dtype) and value.names is None and not value.hasobject:
        return {"numpy_dtype": value.str}
    if isinstance(value, type) and has_path(value):
        return {"class": class_path(value)}
    if isinstance(value, enum.Flag):  # a combination of flags has no name
        return {"flag": int(value.value), "of": class_path(type(value))}
    if isinstance(value, enum.Enum) and value.name is not None:
        return {"enum": value.name, "of": class_path(type(value))}
    return None


def decode_constant(value: Mapping[str, Any], held: Any) -> Any:
    """Invert :func:`encode_constant`.

    Args:
        value: the encoded tree.
        held: current value, whose class is used if its name matches.

    Example:
        >>> decode_constant({"range": [0, 3, 1]}, None)
        range(0, 3)
    """
    (kind, inner), *_ = value.items()
    if kind == "path":
        return type(held)(inner) if isinstance(held, PurePath) else Path(inner)
    if kind == "numpy_dtype":
        return np.dtype(inner)
    if kind == "class":
        return class_at(inner)
    if kind == "flag":
        return class_at(value["of"], held, base=enum.Flag)(inner)
    if kind == "enum":
        return class_at(value["of"], held, base=enum.Enum)[inner]
    return _FROM_TEXT[kind](inner)


CONSTANTS = frozenset((*_FROM_TEXT, "path", "enum", "flag", "numpy_dtype", "class"))


def class_path(kind: type) -> str:
    """Return the module and the name of a class, as :func:`class_at` expects them.

    Example:
        >>> class_path(Path)
        'pathlib:Path'
    """
    return f"{kind.__module__}:{kind.__qualname__}"


def has_path(kind: type) -> bool:
    """Return whether a class can be found by its module and name, unlike one defined in a function.

    Example:
        >>> has_path(Path)
        True
    """
    return _found(class_path(kind)) is kind


def class_at(path: str, held: Any = None, *, base: type = object) -> Any:
    """Return a class of an imported module, or the class of ``held`` if its name matches.

    Args:
        path: the class, as :func:`class_path` writes it.
        held: current value.
        base: the class must be a subclass: a file must not choose what is called.

    Raises:
        CheckpointError: there is no such class; loading a checkpoint imports nothing.
    """
    if held is not None and type(held).__qualname__ == path.partition(":")[2]:
        return type(held)
    found = _found(path)
    if not isinstance(found, type) or not issubclass(found, base):
        raise CheckpointError(
            f"the checkpoint holds an object of the class {path.replace(':', '.')}, which this run does not have; "
            "import its module under the same name before resuming"
        )
    return found


def _found(path: str) -> Any:
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
