"""Nested settings under dotted keys, and what differs between two of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings under dotted keys.

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
    """Returns ``dotted key -> (before, now)`` of every setting that differs; both are nested settings."""
    before, now = flat(stored), flat(current)
    keys = [*now, *(key for key in before if key not in now)]
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}
