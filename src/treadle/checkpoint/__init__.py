"""Checkpoints: one schema, atomic writes, verified reads."""

from __future__ import annotations

import typing as _typing

from treadle.lazy import lazy_names as _lazy_names

if _typing.TYPE_CHECKING:
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

if not _typing.TYPE_CHECKING:
    __getattr__, __dir__ = _lazy_names(
        globals(), {"convert": __all__[1:2], "store": [name for name in __all__ if name != "convert_checkpoint"]}
    )
