"""Nested dataclasses from plain values, with validation of keys and types."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from treadle.config.grammar import Written, read_value
from treadle.config.tree import join_path
from treadle.errors import MISSING, ConfigError, nearest, refuse_unknown

Section = TypeVar("Section")

_SYNONYMS = {"lr": "learning_rate", "learning_rate": "lr"}
_FILES = {"path", "file", "files", "folder", "dir", "csv", "data_path", "data_dir", "data_file", "train_file"}


def from_nested(kind: type[Section], values: Mapping[str, Any], *, where: str = "", complete: bool = False) -> Section:
    """Build nested dataclasses from nested plain values.

    All values of a section are set at once, since its validation may compare fields.

    Args:
        kind: a dataclass whose fields are values or dataclasses.
        values: values of fields; a :class:`~treadle.config.grammar.Written` is interpreted like on a command line, a
            number is accepted for a string, a list for a tuple. Not changed.
        where: the dotted name of this section, for messages; empty for the root.
        complete: whether every field must be given; otherwise missing fields keep their defaults.

    Raises:
        ConfigError: a key is unknown or missing, a value has the wrong type, or a dataclass refuses it.

    Example:
        >>> @dataclasses.dataclass
        ... class Settings:
        ...     lr: float = 0.1
        >>> from_nested(Settings, {"lr": 1})
        Settings(lr=1.0)
    """
    made = _fields(kind, None, values, where=where, complete=complete)
    with as_settings(where, _names(kind), only=_only(values)):
        return kind(**made)


def with_nested(base: Section, values: Mapping[str, Any], *, where: str = "") -> Section:
    """Return a copy of nested dataclasses updated with nested plain values, as in :func:`from_nested`.

    Example:
        >>> @dataclasses.dataclass
        ... class Settings:
        ...     lr: float = 0.1
        ...     seed: int = 0
        >>> with_nested(Settings(seed=3), {"lr": Written("1e-2")})
        Settings(lr=0.01, seed=3)
    """
    made = _fields(type(base), base, values, where=where, complete=False)
    with as_settings(where, _names(type(base)), only=_only(values)):
        return dataclasses.replace(base, **made)  # type: ignore[type-var]


def _names(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _only(values: Mapping[str, Any]) -> str | None:
    """Return the field set on a command line, if only one was set."""
    own = [key for key, value in values.items() if isinstance(value, Written)]
    return own[0] if len(own) == 1 else None


def _fields(kind: type, base: Any, values: Any, *, where: str, complete: bool) -> dict[str, Any]:
    """Return the checked values of a section's fields; subsections start from those of ``base``."""
    name, names = where or kind.__name__, _names(kind)
    if not isinstance(values, Mapping):
        raise ConfigError("is a section and takes a mapping of settings", argument=name, value=values)
    refuse_unknown(name, values, names)
    for missing in names if complete else ():
        if missing not in values:
            raise ConfigError("is missing", argument=join_path(where, missing))
    hints, made = typing.get_type_hints(kind), {}
    for key, value in values.items():
        place = join_path(where, key)
        if dataclasses.is_dataclass(getattr(base, key, None)):
            made[key] = with_nested(getattr(base, key), value, where=place)
        elif dataclasses.is_dataclass(hints[key]):
            made[key] = from_nested(hints[key], value, where=place, complete=complete)
        else:
            made[key] = _leaf(value, hints[key], place)
    return made


def _leaf(value: Any, hint: Any, place: str) -> Any:
    if isinstance(value, Written):
        return typed(read_value(str(value)), hint, key=place, text=str(value))
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return typed(value, hint, key=place, text=str(value) if is_number else None)


def refuse_unknown_setting(
    key: str,
    known: Mapping[str, Any],
    own_data: str = "the data comes with the pack; for your own, adapt the script of treadle new",
) -> None:
    """Raise ConfigError unless a dotted key is a known setting, suggesting the closest.

    Args:
        key: the key as written by the user.
        known: dotted key -> value of every setting.
        own_data: the suggestion for a file of data, such as ``data.path``.

    Example:
        >>> refuse_unknown_setting("lr", {"optimizer.lr": 0.1})
        Traceback (most recent call last):
        treadle.errors.ConfigError: unknown setting 'lr'; did you mean 'optimizer.lr'?
    """
    if key in known:
        return
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside:
        example = f"{inside[0]}={known[inside[0]]}"
        raise ConfigError(f"is a section; set its fields one by one, for example {example}", argument=key)
    # "lr" has few letters in common with "optimizer.lr", yet the meaning is clear.
    last = key.rsplit(".", 1)[-1]
    same_end = [name for name in known if name.rsplit(".", 1)[-1] in (last, _SYNONYMS.get(last))]
    section = [name for name in known if "." in key and name.startswith(f"{key.rsplit('.', 1)[0]}.")]
    advice = f"did you mean {same_end[0]!r}?" if same_end else nearest(key, section or known)
    if not same_end and last in _FILES:
        advice = own_data
    raise ConfigError(f"unknown setting {key!r}; {advice}").about(key)


@contextlib.contextmanager
def as_settings(section: str, fields: Collection[str], *, only: str | None = None) -> Iterator[None]:
    """Convert a constructor's ValueError into a ConfigError that names the setting.

    Args:
        section: section of the constructor's settings; empty for the root.
        fields: names of the settings.
        only: the only field that was set, if any: it is blamed for an error that names no field.

    Raises:
        ConfigError: the constructor raised ValueError.

    Example:
        >>> with as_settings("model", ["width"]):
        ...     raise ConfigError("must be 1 or more", argument="width", value=0)
        Traceback (most recent call last):
        treadle.errors.ConfigError: model.width=0: must be 1 or more
    """
    try:
        yield
    except ValueError as error:
        named = _in_section(error, section, fields, only)
        if named is error:
            raise
        raise named from error


def _in_section(error: ValueError, section: str, fields: Collection[str], only: str | None) -> ValueError:
    """Return a constructor's error with the section prepended to the argument that it names."""
    place = f"{section}." if section else ""
    if isinstance(error, ConfigError) and error.argument is not None:
        name = error.argument.rpartition(".")[2]
        if place and error.argument.startswith(place):
            return error
        if name in fields and (place or only is not None):
            return error.renamed(f"{place}{name}")
        if only is not None and error.value is not MISSING:  # the argument's name differs from the field's
            return error.renamed(f"{place}{only}")
    about = f"{place}{only}" if only is not None else section
    return ConfigError(str(error), argument=about) if about else error


def typed(value: Any, hint: Any, *, key: str, text: str | None = None) -> Any:
    """Return a value converted to a field's type: a whole number is accepted for a float.

    Args:
        value: the given value.
        hint: type of the field.
        key: name of the field, for messages.
        text: the value as written, which a string field takes unchanged; None: strings were given as strings.

    Raises:
        ConfigError: it has another type, or is not finite.

    Example:
        >>> typed(1, float, key="lr"), typed(2024, str, key="folder", text="2024")
        (1.0, '2024')
    """
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for option in options:
        if _fits(value, option):
            if isinstance(value, list) and option is not list and (typing.get_origin(option) or option) is tuple:
                return tuple(value)
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"={value if text is None else text}: must be a finite number", argument=key)
            return float(value) if option is float else value
    if text is not None and str in options:  # a string that looks like a number, such as a folder named 2024
        return text
    names = [name for option in options for name in _names_of(option)]
    shown = repr(value) if text is None else text
    raise ConfigError(f"={shown}: must be {' or '.join(names)}, but this is {_kind(value)}", argument=key)


def _fits(value: Any, option: Any) -> bool:
    if option is types.NoneType:
        return value is None
    if option is bool or isinstance(value, bool):
        return option is bool and isinstance(value, bool)
    if option is float:
        return isinstance(value, (int, float))
    if typing.get_origin(option) is typing.Literal:
        return value in typing.get_args(option)
    if option is Path:
        return False  # plain strings are accepted where str is allowed too
    kind = typing.get_origin(option) or option
    return isinstance(kind, type) and isinstance(value, (list, tuple) if kind in (list, tuple) else kind)


def _names_of(option: Any) -> list[str]:
    if typing.get_origin(option) is typing.Literal:
        return [repr(word) for word in typing.get_args(option)]
    return ["None" if option is types.NoneType else getattr(option, "__name__", str(option))]


def _kind(value: Any) -> str:
    return "None" if value is None else f"the {type(value).__name__} {value!r}"
