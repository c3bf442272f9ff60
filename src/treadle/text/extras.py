"""Lazy imports of the optional packages of this pack."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Disable the progress bars that transformers shows for every file it writes, inside the block.

    Raises:
        ImportError: the package ``transformers`` is not installed.
    """
    bars = import_extra("transformers.utils.logging")
    before = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            bars.enable_progress_bar()
