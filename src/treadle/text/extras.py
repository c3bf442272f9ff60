"""Lazy imports of the optional packages of this pack."""

from __future__ import annotations

import importlib
from typing import Any

from treadle.errors import MissingExtraError


def import_extra(name: str) -> Any:
    """Import a module of the extra ``hf``.

    Args:
        name: dotted name, such as ``"transformers"``.

    Raises:
        ImportError: the module is not installed; the message explains how to install it.

    Example:
        >>> import_extra("json").loads("[1]")
        [1]
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(f"treadle.text needs {name} ({error}): pip install 'treadle[hf]'") from error
