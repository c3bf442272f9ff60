"""Base class of all hooks; :mod:`treadle.engine.hook` defines its events and documents the loop."""

from __future__ import annotations

from treadle.engine.hook import EVENTS, STEP_EVENTS, BaseHook, capturable, listeners, reaches_hooks, read_only

__all__ = ["EVENTS", "STEP_EVENTS", "BaseHook", "capturable", "listeners", "looks_only", "reaches_hooks", "read_only"]

looks_only = read_only  # former name
