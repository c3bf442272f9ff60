"""Checkpoints: one schema, written whole or not at all, verified when read."""

from __future__ import annotations

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
