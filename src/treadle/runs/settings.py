"""Nested settings: flattening to dotted keys, texts ``key=value`` applied to them, differences and updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from treadle.config.grammar import Written, parse
from treadle.config.sections import refuse_unknown_setting, with_nested
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


def refuse_idle(settings: Sequence[str], values: Mapping[str, Any], idle: Iterable[tuple[str, str]]) -> None:
    """Reject explicit settings that have no effect in combination with the others.

    Args:
        settings: the given strings ``key=value``; only these can be mistakes.
        values: all settings as nested plain values.
        idle: the settings or sections that nothing reads, with the reason.

    Raises:
        ConfigError: one of the settings has no effect.

    Example:
        >>> refuse_idle(["ema.decay=0.9"], {"ema": {"decay": 0.9}}, [("ema.decay", "ema.enabled is False")])
        Traceback (most recent call last):
        treadle.errors.ConfigError: ema.decay=0.9: has no effect, as ema.enabled is False; leave it out
    """
    reasons = dict(idle)
    for text in settings:
        key = text.partition("=")[0].strip().lstrip("+")
        reason = next((why for prefix, why in reasons.items() if f"{key}.".startswith(f"{prefix}.")), None)
        value = _value(values, key)
        if reason is not None and value is not None:
            raise ConfigError(f"={value}: has no effect, as {reason}; leave it out", argument=key)


def _value(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def check_seeds(**seeds: int) -> None:
    """Raise ConfigError for a seed that numpy and scikit-learn would reject, possibly only after the training.

    Args:
        seeds: by dotted key, with two underscores for a dot.
    """
    for name, seed in seeds.items():
        if not 0 <= seed < 2**32:
            raise ConfigError(
                f"must be a whole number from 0 to {2**32 - 1}", argument=name.replace("__", "."), value=seed
            )


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
