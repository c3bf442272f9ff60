"""Hooks: everything that watches a run. One file per hook; none imports another."""

from __future__ import annotations

from treadle.hooks.base import EVENTS, BaseHook

__all__ = ["EVENTS", "BaseHook"]
