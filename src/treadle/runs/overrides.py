"""Command-line overrides ``key=value``: parsed, checked against the field's type, and set in nested dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from treadle.config.grammar import Written, parse
from treadle.config.sections import refuse_unknown_setting, with_nested
from treadle.errors import ConfigError

Config = TypeVar("Config")


def apply_overrides(
    config: Config, assignments: Sequence[str], *, elsewhere: Mapping[str, str] | None = None
) -> Config:
    """Return a copy of a configuration with assignments such as ``"model.d_model=64"`` applied.

    Values are parsed by :func:`treadle.config.grammar.read_value` and must have the field's type; an integer is
    accepted for a float, and a field of type ``str`` takes the string as it is. The later of two assignments to a field
    wins.

    Args:
        config: a dataclass whose fields are values or further dataclasses; not modified.
        assignments: strings ``key=value``; a dot goes one level down. ``+key=value`` is the same: no field can be
            added.
        elsewhere: fields that cannot be set this way -> what to use instead.

    Raises:
        ConfigError: an assignment has no ``=``, a key is unknown, a value has the wrong type, or a dataclass rejects
            it.

    Example:
        >>> @dataclasses.dataclass
        ... class Settings:
        ...     lr: float = 0.1
        >>> apply_overrides(Settings(), ["lr=1e-3"])
        Settings(lr=0.001)
    """
    known = {key: value for key, value in leaves(config) if key not in (elsewhere or {})}
    given: dict[str, Any] = {}
    for assignment in assignments:
        before, equals, _ = assignment.partition("=")
        if not equals or not before.strip("+ "):
            raise ConfigError(f"{assignment!r}: settings are written key=value, for example {_example(config)}")
        found = parse(assignment)
        if elsewhere and found.key in elsewhere:
            raise ConfigError(f"is not set this way; use {elsewhere[found.key]}", argument=found.key)
        refuse_unknown_setting(found.key, known)
        if found.sign != "=":
            raise found.error(f"settings of a pack are replaced as a whole, for example {found.key}={known[found.key]}")
        *path, name = found.keys
        section = given
        for part in path:
            section = section.setdefault(part, {})
        section[name] = Written(found.raw.strip())
    return with_nested(config, given)


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(dotted key, value)`` of every field that is not a section.

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
