"""Helpers for nested configurations: names of paths, copies of containers, and merging."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from treadle.errors import ConfigError, nearest
from treadle.errors.arguments import checked


def join_path(prefix: str, key: Any) -> str:
    """Return the dotted path of ``key`` inside ``prefix``.

    Example:
        >>> join_path(join_path("model", "layers"), 2)
        'model.layers[2]'
    """
    if isinstance(key, str) and key and not set(key) & set(".[]= \n"):
        return f"{prefix}.{key}" if prefix else key
    return f"{prefix}[{key!r}]"


def nearest_key(key: Any, known: Iterable[Any]) -> str:
    """Return a hint listing the existing keys, closest first."""
    names = [str(name) for name in known]
    return nearest(str(key), names) if names else "there are no keys"


def copied(value: Any) -> Any:
    """Copy dicts, lists and tuples, but not the values in them.

    Example:
        >>> inner = [1]
        >>> copied({"a": inner})["a"] is inner
        False
    """
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copied(item) for item in value]
    if isinstance(value, tuple):
        return same_tuple(value, [copied(item) for item in value])
    return value


def same_tuple(original: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """Return a tuple of ``items``, of the named tuple type of ``original`` if it has one and the length fits."""
    if hasattr(original, "_make") and len(items) == len(original):
        return original._make(items)  # type: ignore[no-any-return]
    return tuple(items)


_log = logging.getLogger("treadle.config")


class _Delete:
    """Type of DELETE; copies and pickles return the same object, so ``is`` always works."""

    def __repr__(self) -> str:
        return "DELETE"

    def __reduce__(self) -> str:
        return "DELETE"


DELETE = _Delete()
"""As a value in a configuration that is merged over another: removes the key."""


@dataclass(frozen=True)
class REPLACE:
    """Marker in a configuration merged over another: its dict replaces the other's instead of merging into it.

    Example:
        >>> merge_configs({"model": {"type": "A", "depth": 3}}, {"model": REPLACE({"type": "B"})})
        {'model': {'type': 'B'}}
    """

    value: Any
    """The value after the merge."""


@checked
def merge_configs(base: Mapping[str, Any], over: Mapping[str, Any], *, where: str = "") -> dict[str, Any]:
    """Merge one configuration over another: dicts key by key; everything else, including lists, is replaced.

    Args:
        base: the earlier configuration.
        over: the later one, which takes precedence; it may contain :data:`DELETE` and :class:`REPLACE`.
        where: the name of the file that ``over`` came from, for messages.

    Returns:
        A new dict that shares no dict, list or tuple with its inputs, which are not changed.

    Raises:
        ConfigError: DELETE is in a list, where there is no key to remove.

    Example:
        >>> merge_configs({"lr": 0.1, "data": {"size": 32, "seed": 1}}, {"data": {"size": 64, "seed": DELETE}})
        {'lr': 0.1, 'data': {'size': 64}}
    """
    merged: dict[str, Any] = _settled(base, where, "")
    _merge_into(merged, over, where, "")
    return merged


def _merge_into(target: dict[str, Any], over: Mapping[str, Any], where: str, place: str) -> None:
    for key, value in over.items():
        here = join_path(place, key)
        if value is DELETE:
            if key not in target:
                _log.warning(
                    "%s%s: DELETE of a key that no earlier configuration has does nothing; %s",
                    _prefix(where), here, nearest_key(key, target),
                )  # fmt: skip
            target.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _merge_into(target[key], value, where, here)
        else:
            target[key] = _settled(value, where, here)


def _settled(value: Any, where: str, place: str) -> Any:
    """Copy a value without counterpart, removing its markers, which have no effect."""
    if isinstance(value, REPLACE):
        return _settled(value.value, where, place)
    if value is DELETE:
        raise ConfigError(
            f"{_prefix(where)}{place}: DELETE removes the key of a dict and has no meaning here; write the whole list"
        )
    if isinstance(value, Mapping):
        kept: dict[Any, Any] = {}
        _merge_into(kept, value, where, place)
        return kept
    if isinstance(value, (list, tuple)):
        items = [_settled(item, where, join_path(place, index)) for index, item in enumerate(value)]
        return items if isinstance(value, list) else same_tuple(value, items)
    return value


def _prefix(where: str) -> str:
    return f"{where}: " if where else ""
