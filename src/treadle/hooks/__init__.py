"""Hooks: everything that watches a run. One file per hook; none imports another."""

from __future__ import annotations

from treadle.hooks.bar import ProgressBarHook
from treadle.hooks.base import EVENTS, BaseHook
from treadle.hooks.checkpointing import CheckpointingHook
from treadle.hooks.ema import EmaHook
from treadle.hooks.history import HistoryHook
from treadle.hooks.logging import LoggingHook
from treadle.hooks.progress import ProgressHook
from treadle.hooks.signals import SignalHook

__all__ = [
    "EVENTS",
    "BaseHook",
    "CheckpointingHook",
    "EmaHook",
    "HistoryHook",
    "LoggingHook",
    "ProgressBarHook",
    "ProgressHook",
    "SignalHook",
]
