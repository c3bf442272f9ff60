"""Runs as the commands make them: folders, records, settings, replay, ranks; nothing here draws on a terminal."""

from __future__ import annotations
