"""Helpers for nested configurations: names of paths, and copies of containers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from treadle.errors import nearest


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
    return nearest(str(key), names) if names else "there is no key at all"


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
