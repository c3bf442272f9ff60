"""Checkpoints: one schema, written whole or not at all, verified when read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.lazy import lazy_names

if TYPE_CHECKING:
    from treadle.checkpoint.convert import convert_checkpoint
    from treadle.checkpoint.store import (
        Retention,
        find_latest,
        load_checkpoint,
        load_weights,
        save_checkpoint,
        verify_checkpoint,
    )

__all__ = [
    "Retention",
    "convert_checkpoint",
    "find_latest",
    "load_checkpoint",
    "load_weights",
    "save_checkpoint",
    "verify_checkpoint",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        globals(), {"convert": __all__[1:2], "store": [name for name in __all__ if name != "convert_checkpoint"]}
    )
