"""The functional face: a model, an optimizer and a loss function come in, ``train`` gives a history."""

from __future__ import annotations

from treadle.functional.trainer import Trainer

__all__ = ["Trainer"]
