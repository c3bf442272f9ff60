"""Lazily loaded names of a package, so that importing it costs next to nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazy_names(
    package: dict[str, Any], homes: Mapping[str, Collection[str]], *, modules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package (PEP 562).

    Args:
        package: its ``globals()``, where loaded names are cached.
        homes: names by the module that defines them, relative to the package.
        modules: modules of the package to load lazily.

    Example:
        >>> get, names = lazy_names({"__name__": "treadle"}, {"nested": ["key_average"]})
        >>> get("key_average").__name__, names()
        ('key_average', ['__name__', 'key_average'])
    """
    prefix = package["__name__"]
    home = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name in home:
            package[name] = value = getattr(importlib.import_module(f"{prefix}.{home[name]}"), name)
            return value
        if name in modules:
            return importlib.import_module(f"{prefix}.{name}")
        raise AttributeError(f"module {prefix!r} has no attribute {name!r}")

    return get, lambda: sorted({*package, *home, *modules})
