"""Deep merge of configurations."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treadle.config.tree import join_path, nearest_key, same_tuple
from treadle.errors import ConfigError
from treadle.errors.arguments import checked

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
                _warn_of_useless_delete(where, here, nearest_key(key, target))
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


def _warn_of_useless_delete(where: str, place: str, hint: str) -> None:
    _log.warning(
        "%s%s: DELETE of a key that no earlier configuration has does nothing; %s", _prefix(where), place, hint
    )


def _prefix(where: str) -> str:
    return f"{where}: " if where else ""
