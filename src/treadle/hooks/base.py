"""The base of all hooks and its events; :mod:`treadle.engine.hook` defines them and writes the loop down."""

from __future__ import annotations

from treadle.engine.hook import EVENTS, STEP_EVENTS, BaseHook, capturable, listeners, reaches_hooks, read_only

__all__ = ["EVENTS", "STEP_EVENTS", "BaseHook", "capturable", "listeners", "looks_only", "reaches_hooks", "read_only"]

looks_only = read_only  # former name
