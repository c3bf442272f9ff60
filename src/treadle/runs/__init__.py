"""Runs of the commands: folders, records, settings, replay, ranks; terminal output is in ``treadle.cli``."""

from __future__ import annotations
