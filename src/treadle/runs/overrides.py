"""``key=value`` on the command line: parsed, checked against the field's type, and set in a tree of dataclasses."""

from __future__ import annotations

import ast
import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from treadle.config.sections import typed
from treadle.errors import ConfigError, nearest
from treadle.runs.setting_names import in_section

Config = TypeVar("Config")

_SYNONYMS = {"lr": "learning_rate", "learning_rate": "lr"}
_WORDS = {"true": True, "false": False, "none": None, "null": None}


def apply_overrides(
    config: Config, assignments: Sequence[str], *, elsewhere: Mapping[str, str] | None = None
) -> Config:
    """Returns a copy of a configuration with assignments such as ``"model.d_model=64"`` made.

    Values are Python literals, else strings; ``true``, ``false``, ``none`` and ``null`` are read too. They must be of
    the field's type; a whole number is good for a float. The later of two assignments to one field counts.

    Args:
        config: a dataclass whose fields are values or further dataclasses; not changed.
        assignments: texts ``key=value``; a dot goes one level down.
        elsewhere: fields that are not set this way -> what to use instead.

    Raises:
        ConfigError: a text has no ``=``, a key is unknown, a value is of the wrong type, or a dataclass refuses it.

    Example:
        >>> @dataclasses.dataclass
        ... class Settings:
        ...     lr: float = 0.1
        >>> apply_overrides(Settings(), ["lr=1e-3"])
        Settings(lr=0.001)
    """
    known = {key: value for key, value in leaves(config) if key not in (elsewhere or {})}
    given: dict[str, str] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"{assignment!r}: settings are written key=value, for example {_example(config)}")
        if elsewhere and key in elsewhere:
            raise ConfigError(f"{key}: is not set this way; use {elsewhere[key]}")
        refuse_unknown_setting(key, known)
        given[key] = text.strip()
    return _replaced(config, given, "")


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields ``(dotted key, value)`` of every field that is no section.

    Example:
        >>> @dataclasses.dataclass
        ... class Settings:
        ...     seed: int = 0
        >>> list(leaves(Settings()))
        [('seed', 0)]
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def _example(config: Any) -> str:
    key, value = next(iter(leaves(config)))
    return f"{key}={value}"


def from_mapping(kind: type[Config], values: Mapping[str, Any], *, where: str) -> Config:
    """Builds a dataclass from a section of settings that has every field, each of its type.

    Args:
        kind: a dataclass.
        values: the section; not changed.
        where: its name, for messages; empty for the root.

    Raises:
        ConfigError: a key is unknown or missing, a value is of the wrong type, or the dataclass refuses it.

    Example:
        >>> @dataclasses.dataclass
        ... class Settings:
        ...     lr: float
        >>> from_mapping(Settings, {"lr": 1}, where="optimizer")
        Settings(lr=1.0)
    """
    hints, place = typing.get_type_hints(kind), f"{where}." if where else ""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]  # a dataclass, as said
    for key in values:
        refuse_unknown_setting(f"{place}{key}", {f"{place}{name}": values.get(name) for name in names})
    missing = [name for name in names if name not in values]
    if missing:
        raise ConfigError(f"{place}{missing[0]}: is missing")
    fields = {name: typed(values[name], hints[name], key=f"{place}{name}", text=str(values[name])) for name in names}
    try:
        return kind(**fields)
    except ValueError as error:
        raise ConfigError(in_section(str(error), where, names)) from error


def refuse_unknown_setting(key: str, known: Mapping[str, Any]) -> None:
    """Raises ConfigError unless a dotted key is a known setting; the nearest is named.

    Args:
        key: as the user wrote it.
        known: dotted key -> value of every setting.

    Example:
        >>> refuse_unknown_setting("lr", {"optimizer.lr": 0.1})
        Traceback (most recent call last):
        treadle.errors.ConfigError: unknown setting 'lr'; did you mean 'optimizer.lr'?
    """
    if key in known:
        return
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside:
        raise ConfigError(f"{key}: is a section; set its fields one by one, for example {inside[0]}={known[inside[0]]}")
    # "lr" is far from "optimizer.lr" letter by letter, though nobody could mean anything else.
    last = key.rsplit(".", 1)[-1]
    same_end = [name for name in known if name.rsplit(".", 1)[-1] in (last, _SYNONYMS.get(last))]
    section = [name for name in known if "." in key and name.startswith(f"{key.rsplit('.', 1)[0]}.")]
    advice = f"did you mean {same_end[0]!r}?" if same_end else nearest(key, section or known)
    raise ConfigError(f"unknown setting {key!r}; {advice}")


def _replaced(config: Config, given: Mapping[str, str], section: str) -> Config:
    """Returns a copy with what is given of a section, all at once: its rules may compare one field with another."""
    prefix = f"{section}." if section else ""
    if not any(key.startswith(prefix) for key in given):
        return config
    hints, made = typing.get_type_hints(type(config)), {}
    fields = [field.name for field in dataclasses.fields(config)]  # type: ignore[arg-type]  # a dataclass, as said
    for name in fields:
        key, value = f"{prefix}{name}", getattr(config, name)
        if dataclasses.is_dataclass(value):
            made[name] = _replaced(value, given, key)
        elif key in given:
            made[name] = typed(read_value(given[key]), hints[name], key=key, text=given[key])
    own = [name for name in fields if f"{prefix}{name}" in given]
    try:
        return dataclasses.replace(config, **made)  # type: ignore[type-var]
    except ValueError as error:
        only = own[0] if len(own) == 1 else None
        raise ConfigError(in_section(str(error), section, fields, only=only)) from error


def read_value(text: str) -> Any:
    """Returns what a text means: a Python literal, one of the words true, false, none and null, else the string.

    Example:
        >>> read_value("1e-3"), read_value("none"), read_value("cuda:0")
        (0.001, None, 'cuda:0')
    """
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
