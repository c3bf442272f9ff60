"""Nested settings under dotted keys, and what differs between two of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from treadle.config.sections import with_nested
from treadle.errors.arguments import check_within

Config = TypeVar("Config")


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under dotted keys.

    Example:
        >>> flat({"model": {"d_model": 64}})
        {'model.d_model': 64}
    """
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result.update(flat(value, f"{prefix}{key}."))
        else:
            result[f"{prefix}{key}"] = value
    return result


def changes(stored: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return ``dotted key -> (before, now)`` of every setting that differs; both are nested settings."""
    before, now = flat(stored), flat(current)
    keys = [*now, *(key for key in before if key not in now)]
    # Of runs from before a setting was there: switched off is what they had.
    known = [key for key in keys if key in before or now[key] not in (None, False)]
    return {key: (before.get(key), now.get(key)) for key in known if before.get(key) != now.get(key)}


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of a tree of dataclasses with stored settings in it; other values stay.

    Args:
        config: a dataclass whose fields are values or further dataclasses.
        values: nested settings, as ``dataclasses.asdict`` makes them.

    Raises:
        ConfigError: there is no such field, or a value is not of its type.

    Example:
        >>> @dataclasses.dataclass
        ... class Settings:
        ...     lr: float = 0.1
        >>> with_values(Settings(), {"lr": 0.2})
        Settings(lr=0.2)
    """
    return with_nested(config, values)


def without(config: Any, hidden: Iterable[str]) -> dict[str, Any]:
    """Return a tree of dataclasses as nested plain values, without some settings.

    Args:
        config: the tree.
        hidden: dotted keys, each of a setting inside a section.

    Example:
        >>> @dataclasses.dataclass
        ... class Model:
        ...     width: int = 8
        ...     depth: int = 2
        >>> @dataclasses.dataclass
        ... class Settings:
        ...     model: Model = dataclasses.field(default_factory=Model)
        >>> without(Settings(), ["model.depth"])
        {'model': {'width': 8}}
    """
    values = dataclasses.asdict(config)
    for key in hidden:
        section, name = key.split(".")
        del values[section][name]
    return values


def check_seeds(**seeds: int) -> None:
    """Raise ConfigError for a seed that numpy and scikit-learn would refuse, perhaps after the training.

    Args:
        seeds: by dotted key, written with two underscores for a dot.

    Example:
        >>> check_seeds(seed=0, data__split_seed=7)
    """
    check_within(f"[0, {2**32})", **seeds)
