"""Trees of dataclasses from nested plain values: every key known, every value of its field's type."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from treadle.config.tree import join_path
from treadle.errors import ConfigError, refuse_unknown

Section = TypeVar("Section")


def from_nested(kind: type[Section], values: Mapping[str, Any], *, where: str = "") -> Section:
    """Builds a dataclass, and those in it, from nested plain values.

    Args:
        kind: a dataclass whose fields are values or further dataclasses.
        values: the values of fields; a field that is not there keeps its default. Not changed.
        where: the dotted name of this section, for messages; empty for the root.

    Raises:
        ConfigError: a key is unknown, a value is of the wrong type, or a dataclass refuses it.

    Example:
        >>> @dataclasses.dataclass
        ... class Settings:
        ...     lr: float = 0.1
        >>> from_nested(Settings, {"lr": 1})
        Settings(lr=1.0)
    """
    name = where or kind.__name__
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name}={values!r}: is a section and takes a mapping of settings")
    hints = typing.get_type_hints(kind)
    refuse_unknown(name, values, [field.name for field in dataclasses.fields(kind)])  # type: ignore[arg-type]
    made = {}
    for key, value in values.items():
        place = join_path(where, key)
        if dataclasses.is_dataclass(hints[key]):
            made[key] = from_nested(hints[key], value, where=place)
        else:
            made[key] = typed(value, hints[key], key=place)
    return kind(**made)


def typed(value: Any, hint: Any, *, key: str, text: str | None = None) -> Any:
    """Returns a value as a field's type has it: a whole number is good for a float.

    Args:
        value: what was given.
        hint: the type of the field.
        key: its name, for messages.
        text: how the value was written, which a field for strings takes as it is; None: a string was given as one.

    Raises:
        ConfigError: it is of another type, or no finite number.

    Example:
        >>> typed(1, float, key="lr"), typed(2024, str, key="folder", text="2024")
        (1.0, '2024')
    """
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) or _is_union(hint) else (hint,)
    for option in options:
        if _fits(value, option):
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{key}={value if text is None else text}: must be a finite number")
            return float(value) if option is float else value
    if text is not None and str in options:  # a string that happens to look like a number, such as a folder named 2024
        return text
    names = [("None" if option is types.NoneType else getattr(option, "__name__", str(option))) for option in options]
    shown = repr(value) if text is None else text
    raise ConfigError(f"{key}={shown}: must be {' or '.join(names)}, but this is {_kind(value)}")


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Union


def _fits(value: Any, option: Any) -> bool:
    if option is types.NoneType:
        return value is None
    if option is bool or isinstance(value, bool):
        return option is bool and isinstance(value, bool)
    if option is float:
        return isinstance(value, (int, float))
    if option is Path:
        return False  # plain text is taken where str is allowed too
    kind = typing.get_origin(option) or option
    return isinstance(kind, type) and isinstance(value, kind)


def _kind(value: Any) -> str:
    return "None" if value is None else f"the {type(value).__name__} {value!r}"
