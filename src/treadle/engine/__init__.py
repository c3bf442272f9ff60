"""The engine: the loop, its step, and the objects that hold the state of a run."""

from __future__ import annotations

from treadle.engine.loop import Engine

__all__ = ["Engine"]
