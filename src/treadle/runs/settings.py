"""Nested settings: flattening to dotted keys, differences, updates and range checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from treadle.config.sections import with_nested
from treadle.errors import ConfigError

Config = TypeVar("Config")


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted keys.

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
    """Return ``dotted key -> (before, now)`` of every setting that differs between two nested settings."""
    before, now = flat(stored), flat(current)
    keys = [*now, *(key for key in before if key not in now)]
    # Runs that predate a setting had it switched off.
    known = [key for key in keys if key in before or now[key] not in (None, False)]
    return {key: (before.get(key), now.get(key)) for key in known if before.get(key) != now.get(key)}


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of nested dataclasses updated with stored settings.

    Args:
        config: a dataclass whose fields are values or further dataclasses.
        values: nested settings, as from ``dataclasses.asdict``.

    Raises:
        ConfigError: there is no such field, or a value has the wrong type.

    Example:
        >>> @dataclasses.dataclass
        ... class Settings:
        ...     lr: float = 0.1
        >>> with_values(Settings(), {"lr": 0.2})
        Settings(lr=0.2)
    """
    return with_nested(config, values)


def without(config: Any, hidden: Iterable[str]) -> dict[str, Any]:
    """Return nested dataclasses as nested plain values, without some settings.

    Args:
        config: the nested dataclasses.
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


def at_least(least: float, **values: float | None) -> None:
    """Raise ConfigError for a setting smaller than ``least``; accept None.

    Args:
        least: the smallest allowed value.
        values: by dotted key, with two underscores for a dot.

    Example:
        >>> at_least(1, epochs=3, data__max_topics=None)
    """
    for name, value in values.items():
        if value is not None and not value >= least:
            raise ConfigError(f"must be at least {least:g}", argument=name.replace("__", "."), value=value)


def between(least: float, most: float, **values: float) -> None:
    """Raise ConfigError for a setting outside [least, most].

    Args:
        least: the smallest allowed value.
        most: the largest allowed value.
        values: by dotted key, with two underscores for a dot.

    Example:
        >>> between(0, 1, model__dropout=0.1)
    """
    for name, value in values.items():
        if not least <= value <= most:
            raise ConfigError(f"must lie between {least:g} and {most:g}", argument=name.replace("__", "."), value=value)


def check_seeds(**seeds: int) -> None:
    """Raise ConfigError for a seed that numpy and scikit-learn would reject, possibly only after the training.

    Args:
        seeds: by dotted key, with two underscores for a dot.

    Example:
        >>> check_seeds(seed=0, data__split_seed=7)
    """
    for name, seed in seeds.items():
        if not 0 <= seed < 2**32:
            raise ConfigError(
                f"must be a whole number from 0 to {2**32 - 1}", argument=name.replace("__", "."), value=seed
            )
