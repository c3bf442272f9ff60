"""Trainer of a model, an optimizer and a loss function; ``train`` returns a history."""

from __future__ import annotations

from treadle.functional.trainer import Trainer

__all__ = ["Trainer"]
