"""Where the data comes from, and where in it a run stands."""

from __future__ import annotations

from treadle.data.cursor import Cursor, Group, steps_per_epoch
from treadle.data.sources import Source, open_source

__all__ = ["Cursor", "Group", "Source", "open_source", "steps_per_epoch"]
