"""View of a user's config of any class: parts and fields as plain values."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import types
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from treadle.errors import ConfigError

_LACKING = (AttributeError, KeyError, TypeError, LookupError)


class UserConfig:
    """Read-only view of a mapping, namespace, dataclass or other object with settings by key or attribute.

    Args:
        source: the object.
        where: its name in messages.
        known: names to look up if the object does not list them, as with properties and ``__getattr__``.

    Example:
        >>> config = UserConfig({"training": types.SimpleNamespace(lr=0.1)}, "config", ["lr"])
        >>> config.part("training").fields()
        {'lr': 0.1}
        >>> config.part("model") is None
        True
    """

    def __init__(self, source: Any, where: str, known: Iterable[str]):
        self.source = source
        self._where = where
        self._known = tuple(known)
        if isinstance(source, type) and dataclasses.is_dataclass(source):
            raise ConfigError(f"is the class {source.__name__}; pass an instance: {source.__name__}()", argument=where)

    def part(self, name: str) -> UserConfig | None:
        """Return a part under a key or an attribute, or None.

        Raises:
            ConfigError: it is a number, a string or another value without fields.
        """
        found = None
        if isinstance(self.source, Mapping) and name in self.source:
            found = self.source[name]
        elif not isinstance(self.source, (str, bytes, list, tuple)) or hasattr(self.source, name):
            found = self._asked(name)
        if found is None:
            return None
        part = UserConfig(found, f"{self._where}.{name}", self._known)
        if isinstance(found, (str, bytes, int, float, list, set)) or (type(found) is tuple and found):
            raise ConfigError("must be a dict or an object with fields", argument=part._where, value=found)
        return part

    def value(self, name: str) -> Any:
        """Return a value under a key or an attribute as a plain value; None if missing or unreadable."""
        if isinstance(self.source, Mapping):
            return plain(self.source[name]) if name in self.source else None
        with contextlib.suppress(*_LACKING):
            return plain(self._asked(name))
        return None

    def _asked(self, name: str) -> Any:
        """Return the object's value for a name as an attribute, else as a key."""
        value = getattr(self.source, name, None)
        if value is None and not isinstance(self.source, (Mapping, type)) and hasattr(self.source, "__getitem__"):
            with contextlib.suppress(*_LACKING):
                value = self.source[name]
        return None if isinstance(value, (types.FunctionType, types.MethodType)) else value

    def names(self) -> list[str]:
        """Return the names of the fields, without reading values if the object lists them."""
        listed = self._listed()
        return list(self.fields(closed=True)) if listed is None else [str(name) for name in listed]

    def fields(self, *, closed: bool = False) -> dict[str, Any]:
        """Return the public fields of the object and of its classes, and the known names that it provides.

        Args:
            closed: whether it may have no visible fields.

        Raises:
            ConfigError: it has none, or one is unreadable.
        """
        listed = self._listed()
        if listed is not None:
            found = {name: self._read(get, name) for name, get in {**self._properties(), **listed}.items()}
            return {str(name): plain(value) for name, value in found.items()}
        attributes = _attributes_of(self.source)
        properties = {name: self._read(get, name) for name, get in self._properties().items()}
        found = {**self._served(), **_public(attributes), **properties}
        # An empty namespace, or an object with only hidden attributes and no keys.
        empty = not found and type(self.source) is not types.SimpleNamespace
        if empty and not closed and (not attributes or _serves(self.source)):
            raise ConfigError(
                f"a {type(self.source).__name__} has neither keys nor attributes, so its settings cannot be read; "
                "pass a dict, a dataclass or an object with attributes",
                argument=self._where,
            )
        return {name: plain(value) for name, value in found.items()}

    def _listed(self) -> dict[Any, Callable[[], Any]] | None:
        """Return a reader for each field of an object that lists them, or None."""
        source, kind = self.source, type(self.source)
        if isinstance(source, Mapping):
            return {name: partial(source.__getitem__, name) for name in source}
        declared: Any = None
        if dataclasses.is_dataclass(source):
            declared = [field.name for field in dataclasses.fields(source)]
        elif isinstance(source, tuple) and hasattr(source, "_fields"):
            declared = source._fields
        else:  # classes of pydantic and attrs
            for names in ("model_fields", "__attrs_attrs__"):
                declared = declared or [getattr(one, "name", one) for one in getattr(kind, names, ())]
        if declared:
            return {name: partial(getattr, source, name) for name in declared}
        if isinstance(source, type) or not hasattr(kind, "__getitem__"):
            return None
        if callable(getattr(source, "keys", None)):  # such as ml_collections' ConfigDict
            return {name: partial(source.__getitem__, name) for name in source.keys()}  # noqa: SIM118  (not iterable)
        if hasattr(kind, "__iter__"):  # such as qurious' Config
            return {name: partial(source.__getitem__, name) for name in source}
        return None

    def _read(self, get: Callable[[], Any], name: Any) -> Any:
        try:
            return get()
        except Exception as error:
            raise ConfigError(
                f"cannot be read: {type(error).__name__}: {error}", argument=f"{self._where}.{name}"
            ) from error

    def _properties(self) -> dict[str, Callable[[], Any]]:
        """Return a reader for each known setting that is a property."""
        kind = type(self.source)
        names = [name for name in self._known if isinstance(getattr(kind, name, None), property)]
        return {name: partial(getattr, self.source, name) for name in names}

    def _served(self) -> dict[str, Any]:
        """Return the known settings that an object provides by ``__getattr__`` or by key without listing them."""
        if not (_serves(self.source) or hasattr(type(self.source), "__getitem__")):
            return {}
        found: dict[str, Any] = {}
        for name in self._known:
            with contextlib.suppress(*_LACKING):
                value = self._asked(name)
                found |= {} if value is None or _is_method(value) else {name: value}
        return found


def plain(value: Any) -> Any:
    """Convert a setting to a plain value: an enum to its value, a NumPy scalar to a number.

    Example:
        >>> plain(np.float64(0.5)), plain(enum.Enum("Kind", {"BF16": "bf16"}).BF16)
        (0.5, 'bf16')
    """
    value = value.value if isinstance(value, enum.Enum) else value
    return value.item() if isinstance(value, np.generic) else value


def _public(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if not name.startswith("_") and not _is_method(value)}


def _serves(source: Any) -> bool:
    return hasattr(type(source), "__getattr__") or "__getattribute__" in vars(type(source))


def _attributes_of(source: Any) -> dict[str, Any]:
    owners = [*reversed(source.__mro__ if isinstance(source, type) else type(source).__mro__), source]
    found: dict[str, Any] = {}
    for owner in owners:
        slots = vars(owner).get("__slots__", ()) if isinstance(owner, type) else ()
        held = [name for name in ((slots,) if isinstance(slots, str) else slots) if hasattr(source, name)]
        found.update({name: value for name, value in getattr(owner, "__dict__", {}).items() if name not in held})
        found.update({name: getattr(source, name) for name in held})
    return {name: value for name, value in found.items() if not (name.startswith("__") and name.endswith("__"))}


def _is_method(value: Any) -> bool:
    return callable(value) or isinstance(value, (property, classmethod, staticmethod, types.MemberDescriptorType))
